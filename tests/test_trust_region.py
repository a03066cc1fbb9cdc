"""A step of a trust region is the longest natural gradient step that the divergence allows."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torchrl.objectives import PPOLoss

from kit.envs import make_env
from kit.modules import MultiDiscrete, make_actor_critic
from kit.update import TrustRegion
from tests.errors import raises_setting

ROWS = 32
SPACES: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(3),
    "several discrete": gym.spaces.MultiDiscrete([2, 3]),
    "continuous": gym.spaces.Box(-np.ones(2, np.float32), np.ones(2, np.float32)),
}
kinds = pytest.mark.parametrize("kind", list(SPACES))
SPACES["by name"] = gym.spaces.Dict({"gear": gym.spaces.Discrete(3), "gas": SPACES["continuous"]})


class Still(gym.Env[Any, Any]):
    """An environment whose spaces are all that matters."""

    observation_space = gym.spaces.Box(-np.ones(3, np.float32), np.ones(3, np.float32))

    def __init__(self, space: gym.Space[Any]) -> None:
        self.action_space = space

    def reset(self, **_: Any) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 0.0, False, False, {}


def parts(kind: str, hidden: tuple[int, ...] = ()) -> tuple[Any, Any, TensorDictBase]:
    """An actor, the surrogate loss, and a batch with advantages, in double precision."""
    torch.manual_seed(0)
    env = make_env(lambda: Still(SPACES[kind]), num_envs=1)
    actor, _ = make_actor_critic(env, list(hidden))
    env.close()
    actor.double()
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        batch = actor(TensorDict({"observation": torch.randn(ROWS, 3).double()}, [ROWS]))
    batch["advantage"] = torch.randn(ROWS, 1).double()
    loss = PPOLoss(actor, None, entropy_bonus=False, normalize_advantage=False)
    return actor, loss, batch


def vector(module: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def divergence(actor: Any, batch: TensorDictBase, weights: Tensor) -> Tensor:
    """That of the actor with these weights, from the actor as it is."""
    shapes = {name: one.shape for name, one in actor.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    given = zip(shapes.items(), weights.split(sizes))
    weighted = {name: part.view(shape) for (name, shape), part in given}
    with torch.no_grad():
        before = actor.get_dist(batch)
    return torch.func.functional_call(Divergence(actor, batch, before), prefixed(weighted), ())


def prefixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"actor.{name}": value for name, value in weights.items()}


class Divergence(nn.Module):
    """The mean divergence of an actor from a distribution."""

    def __init__(self, actor: Any, batch: TensorDictBase, before: Any) -> None:
        super().__init__()
        self.actor = actor
        self.batch, self.before = batch, before

    def forward(self) -> Tensor:
        return kl_divergence(self.before, self.actor.get_dist(self.batch)).mean()


# ---------------------------------------------------------------------- the step
@kinds
def test_step_matches_dense_linear_algebra(kind):
    """Paper, appendix C: s = sqrt(2 delta / x F x) x with F x = g, F the curvature."""
    actor, loss, batch = parts(kind)
    start = vector(actor)
    gradient = torch.autograd.grad(loss(batch)["loss_objective"], list(actor.parameters()))
    flat = torch.cat([one.flatten() for one in gradient])
    fisher = torch.autograd.functional.hessian(lambda w: divergence(actor, batch, w), start)
    fisher += 0.1 * torch.eye(len(start)).double()
    natural = torch.linalg.solve(fisher, flat)
    longest = natural * (2 * 0.01 / (natural @ fisher @ natural)).sqrt()
    region = TrustRegion(loss, actor, conjugate_gradient_steps=len(start))
    share = float(region(batch)["step_share"])
    trials = round(math.log(share) / math.log(0.8))
    assert 0 <= trials < 10
    share = 0.8**trials
    torch.testing.assert_close(vector(actor), start - share * longest, rtol=1e-4, atol=1e-7)


@kinds
def test_step_improves_loss_within_bound_and_in_place(kind):
    actor, loss, batch = parts(kind, hidden=(8,))
    start, places = vector(actor), [one.data_ptr() for one in actor.parameters()]
    before = loss(batch)["loss_objective"]
    with torch.no_grad():
        old = actor.get_dist(batch)
    metrics = TrustRegion(loss, actor, max_kl=0.02)(batch)
    kl = kl_divergence(old, actor.get_dist(batch)).mean()
    assert 0 < kl <= 0.02
    torch.testing.assert_close(metrics["kl"], kl.detach())
    torch.testing.assert_close(metrics["loss_objective"], before.detach())
    assert loss(batch)["loss_objective"] < before
    assert metrics["grad_norm"] > 0
    assert not torch.equal(vector(actor), start)
    assert [one.data_ptr() for one in actor.parameters()] == places


def test_kl_of_named_actions_is_sum_over_actions():
    actor, loss, batch = parts("by name")
    with torch.no_grad():
        old = actor.get_dist(batch).dists.values()
    metrics = TrustRegion(loss, actor, max_kl=0.02)(batch)
    new = actor.get_dist(batch).dists.values()
    kl = sum(kl_divergence(*both).mean() for both in zip(old, new))
    assert len(new) == 2
    assert 0 < kl <= 0.02
    torch.testing.assert_close(metrics["kl"], kl.detach())


def test_step_is_invariant_to_advantage_scale():
    steps = []
    for scale in (1.0, 1e-9):
        actor, loss, batch = parts("discrete", hidden=(8,))
        start = vector(actor)
        batch["advantage"] *= scale
        TrustRegion(loss, actor)(batch)
        steps.append(vector(actor) - start)
    torch.testing.assert_close(*steps)
    assert steps[0].norm() > 0


@pytest.mark.parametrize("advantage", [0.0, torch.nan])
def test_policy_is_unchanged_without_improvement(advantage):
    actor, loss, batch = parts("discrete")
    batch["advantage"] = torch.full_like(batch["advantage"], advantage)
    start = vector(actor)
    metrics = TrustRegion(loss, actor)(batch)
    assert (metrics["step_share"], metrics["kl"]) == (0, 0)
    assert torch.equal(vector(actor), start)


class Bowl(nn.Module):
    """A loss whose minimum is so near that a long step leads beyond it."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor
        self.minimum = [one.detach() + 1e-3 for one in actor.parameters()]

    def forward(self, batch: TensorDictBase) -> TensorDict:
        """The squared distance from it."""
        apart = [a - b for a, b in zip(self.actor.parameters(), self.minimum)]
        return TensorDict({"loss": sum(one.square().sum() for one in apart)})


def test_line_search_shrinks_step_until_loss_improves():
    actor, _, batch = parts("discrete")
    start, shares = vector(actor), []
    for tries in (1, 30):
        region = TrustRegion(Bowl(actor), actor, line_search_steps=tries, shrinkage=0.5)
        shares.append(float(region(batch)["step_share"]))
        if tries == 1:
            assert torch.equal(vector(actor), start)
    assert shares[0] == 0.0
    assert shares[1] in [0.5**trial for trial in range(1, 30)]


def test_kl_of_multi_discrete_is_sum_over_parts():
    one, other = (MultiDiscrete(torch.randn(4, 5), [2, 3]) for _ in range(2))
    expected = sum(kl_divergence(*both) for both in zip(one.parts, other.parts))
    torch.testing.assert_close(kl_divergence(one, other), expected)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_kl", 0.0),
        ("max_kl", float("inf")),
        ("damping", -1.0),
        ("shrinkage", 1.0),
        ("conjugate_gradient_steps", 0),
        ("line_search_steps", 0),
    ],
)
def test_trust_region_rejects_settings_out_of_range(name, value):
    actor, loss, _ = parts("discrete")
    with raises_setting(name):
        TrustRegion(loss, actor, **{name: value})


def test_trust_region_rejects_recurrent_policy():
    actor, loss, _ = parts("discrete")
    actor.in_keys = [*actor.in_keys, "is_init"]
    with raises_setting("policy"):
        TrustRegion(loss, actor)


def test_trust_region_rejects_loss_independent_of_policy():
    actor, _, batch = parts("discrete")
    env = make_env(lambda: Still(SPACES["discrete"]), num_envs=1)
    other, critic = make_actor_critic(env, [4])
    env.close()
    batch["value_target"] = torch.randn(ROWS, 1).double()
    with_critic = PPOLoss(actor, critic.double(), entropy_bonus=False)
    with raises_setting("loss_module"):
        TrustRegion(with_critic, actor)(batch)
    of_another = PPOLoss(other.double(), None, entropy_bonus=False, normalize_advantage=False)
    with raises_setting("loss_module"):
        TrustRegion(of_another, actor)(batch)
