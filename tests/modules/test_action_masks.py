"""An actor chooses among the actions that the environment's mask allows, and trains so."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import ClipPPOLoss, SoftUpdate

import recipes.ppo
import recipes.sac_discrete
from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.experiment import EnvConfig, OffPolicySteps, OnPolicySteps
from kit.losses import DiscreteSACLoss
from kit.modules import make_actor, make_backbone, make_q_network, make_value
from kit.modules.exploration import EpsilonGreedy
from kit.modules.heads import Heads
from tests.envs.odd_envs import Masked
from tests.errors import raises_setting
from tests.tiny import on_policy_plan, ppo_trainer

SPACES = {"one choice": Discrete(4), "several choices": MultiDiscrete([2, 3])}


class HalfAllowed(gym.Env):
    """Allows about half of the choices, others after each step; refuses those that are not."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)

    def __init__(self, space):
        self.action_space = space
        self.sizes = [space.n] if isinstance(space, Discrete) else list(space.nvec)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._seen(), {"action_mask": self._mask()}

    def step(self, action):
        for choice, allowed in zip(np.atleast_1d(action), self.masks):
            assert allowed[choice], "a forbidden action"
        self.count += 1
        done = self.count == 9
        return self._seen(), 1.0, done, False, {} if done else {"action_mask": self._mask()}

    def _seen(self):
        return self.np_random.random(2, np.float32)

    def _mask(self):
        self.masks = [self.np_random.permutation(size) >= size // 2 for size in self.sizes]
        return np.concatenate(self.masks)


def environment(kind, num_envs=4):
    return make_env(lambda: HalfAllowed(SPACES[kind]), num_envs, seed=1)


def actor_of(env, shared=False):
    torch.manual_seed(0)
    body = make_backbone(env, (8,)) if shared else None
    actor = make_actor(env, (8,), body=body)
    with torch.no_grad():  # or the choices would be about equally probable
        for parameter in actor.parameters():
            parameter.mul_(3).add_(0.3 * torch.randn_like(parameter))
    return actor


def probabilities(actor, batch, kind):
    """Log-probabilities of the actions: each choice's among those allowed."""
    network = next(module.network for module in actor.modules() if isinstance(module, Heads))
    body = next((m for m in actor.modules() if getattr(m, "out_keys", None) == ["features"]), None)
    logits = network(batch["observation"] if body is None else body(batch.clone())["features"])
    sizes = [4] if kind == "one choice" else [2, 3]
    total = 0.0
    actions = batch["action"].reshape(*batch.shape, len(sizes))
    masks = batch["action_mask"].bool().split(sizes, -1)
    for number, (part, mask) in enumerate(zip(logits.split(sizes, -1), masks)):
        chances = torch.where(mask, part.double().exp(), 0.0)
        chosen = chances.gather(-1, actions[..., number, None]).squeeze(-1)
        total = total + (chosen / chances.sum(-1)).log()
    return total


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fast_policy", ["auto", "module"])
@pytest.mark.parametrize("kind", SPACES)
def test_masked_actor_draws_allowed_actions_with_their_log_prob(kind, fast_policy, shared):
    env = environment(kind)
    actor = actor_of(env, shared)
    collector = VectorCollector(env, actor, steps_per_env=64, fast_policy=fast_policy)
    with torch.no_grad():
        for _ in range(3):
            batch = collector.collect()  # the environment refuses forbidden actions
            wanted = probabilities(actor, batch, kind).float()
            torch.testing.assert_close(batch["action_log_prob"], wanted, rtol=1e-4, atol=1e-5)
    assert not batch["action_mask"].all()


@pytest.mark.parametrize("kind", SPACES)
def test_deterministic_action_is_allowed(kind):
    env = environment(kind)
    deterministic = ExplorationType.DETERMINISTIC
    actor = actor_of(env)
    VectorCollector(env, actor, steps_per_env=64, exploration_type=deterministic).collect()
    with set_exploration_type(deterministic):
        env.rollout(20, actor, break_when_any_done=False)


@pytest.mark.parametrize("kind", SPACES)
def test_loss_uses_masked_action_probabilities(kind):
    env = environment(kind)
    actor = actor_of(env)
    batch = VectorCollector(env, actor, steps_per_env=32).collect()
    batch["advantage"] = batch["value_target"] = torch.ones(*batch.shape, 1)
    loss = ClipPPOLoss(actor, make_value(env, (8,)))
    result = loss(batch)
    assert float(result["kl_approx"]) == pytest.approx(0.0, abs=1e-6)
    assert float(result["clip_fraction"]) == 0
    assert 0 < float(result["entropy"].mean()) < np.log(4)
    (result["loss_objective"] + result["loss_entropy"]).backward()
    assert all(parameter.grad.isfinite().all() for parameter in actor.parameters())


def test_ppo_trains_policy_with_action_mask():
    trainer = ppo_trainer(on_policy_plan(), lambda: HalfAllowed(SPACES["one choice"]))
    trainer.run()
    assert all(parameter.isfinite().all() for parameter in trainer.collector.policy.parameters())


def test_actor_applies_mask_from_observation():
    env = make_env(Masked, 2)
    batch = VectorCollector(env, make_actor(env, (8,)), steps_per_env=30).collect()
    assert (batch["action_log_prob"] == 0).all()  # one action is allowed
    assert (batch["action"] == batch["observation"].squeeze(-1).long() % 3).all()


# ---------------------------------------------------------------------- discrete SAC
def discrete_sac(env, **settings):
    torch.manual_seed(0)
    actor = make_actor(env, (8,), return_log_prob=False)
    settings = {"action_space": "categorical", "target_entropy": 0.7 * math.log(4), **settings}
    loss = DiscreteSACLoss(actor, make_q_network(env, (8,)), **settings)
    loss.make_value_estimator(gamma=0.9)
    SoftUpdate(loss, tau=0.1)
    return actor, loss


@pytest.mark.parametrize("alpha", [0.5, 2.0, 1e6])
def test_discrete_sac_is_finite_at_any_temperature(alpha):
    env = environment("one choice")
    actor, loss = discrete_sac(env, alpha_init=alpha, action_mask="action_mask")
    losses = loss(env.rollout(20, actor, break_when_any_done=False).reshape(-1))
    total = sum(losses[name] for name in ("loss_actor", "loss_qvalue", "loss_alpha"))
    total.backward()
    found = [total, *(parameter.grad for parameter in loss.parameters() if parameter.requires_grad)]
    assert all(one.isfinite().all() for one in found)


def test_target_entropy_is_fraction_of_allowed_entropy():
    env = environment("one choice")
    actor, loss = discrete_sac(env, alpha_init=math.e, action_mask="action_mask")
    batch = env.rollout(20, actor, break_when_any_done=False).reshape(-1)
    batch["action_mask"] = torch.arange(4) < torch.arange(len(batch)).unsqueeze(-1) % 4 + 1
    with torch.no_grad():
        for parameter in loss.parameters():  # choices are equally probable
            if parameter is not loss.log_alpha:
                parameter.zero_()
    excess = (1 - 0.7) * sum(math.log(allowed) for allowed in (1, 2, 3, 4)) / 4
    assert float(loss(batch)["loss_alpha"]) == pytest.approx(excess, rel=1e-5)


def test_discrete_sac_temperature_falls_with_few_allowed_actions():
    trainer = recipes.sac_discrete.build(
        recipes.sac_discrete.Config(
            env=EnvConfig("kit.testing.envs:kit/Allowed-v0", num_envs=1),
            steps=OffPolicySteps(
                total_policy_steps=400, steps_per_env=1, learning_starts=100, replay_ratio=1,
                minibatch_size=256,
            ),
            target_entropy=0.9, log_dir=None, progress=False,
        )
    )  # fmt: skip
    trainer.run()
    assert trainer.update.loss_module.log_alpha < 0  # a third is allowed: 0.9 log 12 > log 4


@pytest.mark.parametrize("steps_per_env", [1, 7])
def test_epsilon_greedy_explores_only_allowed_actions(steps_per_env):
    """The environment refuses the others; without exploration the network would choose none."""
    env = make_env(Masked, 2)
    explore = EpsilonGreedy(env, eps_init=1.0, eps_end=1.0)
    policy = TensorDictSequential(make_q_network(env, (8,)), explore).select_out_keys("action")
    collector = VectorCollector(env, policy, steps_per_env=steps_per_env)
    for _ in range(140 // steps_per_env):
        batch = collector.collect()
        chosen = batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1))
        assert chosen.all()
    assert collector.policy_path.name == "program"


def test_epsilon_greedy_has_expected_action_frequencies():
    env = make_env(lambda: HalfAllowed(Discrete(6)), 2)
    explore = EpsilonGreedy(env, eps_init=0.5, eps_end=0.5)
    mask = torch.tensor([True, False, True, True, False, False]).expand(60_000, -1)
    mask = mask[:, : int(env.action_spec.n)]
    given = TensorDict({"action": torch.zeros(60_000).long(), "action_mask": mask}, [60_000])
    torch.manual_seed(0)
    with set_exploration_type(ExplorationType.RANDOM):
        shares = explore(given)["action"].bincount(minlength=mask.shape[1]) / 60_000
    allowed = mask[0].float()
    wanted = 0.5 * allowed / allowed.sum() + 0.5 * torch.eye(mask.shape[1])[0]
    torch.testing.assert_close(shares, wanted, rtol=0, atol=0.01)


class WithMask(gym.Env):
    """Shows a mask of three entries, whatever its actions are."""

    observation_space = gym.spaces.Dict(
        {"x": gym.spaces.Box(0, 1, (2,), np.float32), "action_mask": gym.spaces.MultiBinary(3)}
    )

    def __init__(self, space):
        self.action_space = space


@pytest.mark.parametrize("continuous", ["normal", "tanh_normal", "deterministic"])
def test_make_actor_rejects_mask_for_continuous_actions(continuous):
    env = make_env(lambda: WithMask(gym.spaces.Box(-1, 1, (3,), np.float32)))
    with raises_setting("action_mask"):
        make_actor(env, continuous=continuous)


@pytest.mark.parametrize("make", [make_actor, make_q_network])
def test_networks_reject_action_mask_of_wrong_length(make):
    env = make_env(lambda: WithMask(Discrete(4)))
    with raises_setting("action_mask"):
        make(env)


def test_ppo_learns_nearest_allowed_action():
    steps = OnPolicySteps(total_policy_steps=5_120, evaluation_every=None, evaluation_episodes=20)
    env = EnvConfig("kit.testing.envs:kit/Allowed-v0", num_envs=8, kwargs={"choices": 6})
    cfg = recipes.ppo.Config(env=env, steps=steps, learning_rate=3e-3, log_dir=None, progress=False)
    trainer = recipes.ppo.build(cfg)
    trainer.run()
    assert trainer.journal.latest["evaluation/length"] == 8  # a forbidden choice ends an episode
    assert trainer.journal.latest["evaluation/return"] > 7.0
