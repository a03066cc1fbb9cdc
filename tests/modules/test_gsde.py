"""State-dependent exploration matches Stable-Baselines3's formulas and resampling times."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Normal
from torchrl.envs.utils import ExplorationType, set_exploration_type

from kit.envs import make_env
from kit.experiment import EnvConfig
from kit.modules import StateDependentExploration, make_actor
from kit.modules.gsde import StateDependent
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from tests.errors import raises_setting

BOUNDS = torch.full((2,), -1.0), torch.full((2,), 1.0)
FEATURES = [[0.5, -1.0, 2.0], [0.0, 0.25, -0.75]]
ACTIONS = torch.tensor([[0.3, -0.6], [-0.9, 0.2]])
MATRICES = torch.arange(12.0).reshape(2, 3, 2) / 10
"""Entries of the exploration matrices, after multiplication by their standard deviations."""
OF_SB3 = {
    False: {
        "loc": [[0.9, -3.35], [-0.225, 1.15]],
        "action": [[1.5, -2.6], [-0.775, 0.55]],
        "log_prob": [-3.9067230, -4.4936762],
        "features": [[0.0732509, 0.2783205, -0.2475518], [-1.2565382, 1.4151247, -2.5618675]],
        "log_std": [[-0.0206232, -0.0021776], [3.9045553, -0.0954394], [0.6994508, -1.4601197]],
    },
    True: {
        "loc": [[0.9, -2.0], [-0.225, 1.15]],
        "action": [[0.9051483, -0.8482836], [-0.6498275, 0.5005202]],
        "log_prob": [-3.2705665, -10.3456354],
        "features": [[-0.1005912, 0.8050157, -0.6151693], [-2.0415680, 72.8003082, -7.7479415]],
        "log_std": [[-0.0209361, -0.0026916], [16.8653259, -0.1106781], [2.8367608, -1.6264511]],
    },
}
"""Results of ``StateDependentNoiseDistribution`` (stable-baselines3 2.9.2), by squashing.

``features`` and ``log_std`` are the gradients of the sum of the log-probabilities.
"""


def head_with_weights(squashes: bool) -> StateDependent:
    head = StateDependent(3, (2,), -0.5, bounds=BOUNDS if squashes else None)
    with torch.no_grad():
        head.log_std.copy_(torch.tensor([[-1.0, -0.5], [0.0, 0.5], [-2.0, 1.0]]))
        head.mean.weight.copy_(torch.tensor([[0.1, -0.2, 0.3], [1.5, 2.0, -1.0]]))
        head.mean.bias.copy_(torch.tensor([0.05, -0.1]))
    return head


@pytest.mark.parametrize("squashes", [False, True])
def test_head_matches_stable_baselines3(squashes):
    head, features = head_with_weights(squashes), torch.tensor(FEATURES, requires_grad=True)
    loc, scale = head(features)
    dist = head.distribution(loc, scale, **head.keywords)
    noisy = loc + head.noise(features, MATRICES / head.log_std.exp())
    log_prob = dist.log_prob(ACTIONS)
    log_prob.sum().backward()
    found = {
        "loc": loc,
        "action": dist.squash(noisy) if squashes else noisy,
        "log_prob": log_prob,
        "features": features.grad,
        "log_std": head.log_std.grad,
    }
    for name, expected in OF_SB3[squashes].items():
        torch.testing.assert_close(found[name], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    wanted = torch.tensor([[1.0521870, 5.6891541], [0.2698213, 2.0799611]])
    torch.testing.assert_close(scale, wanted)


def test_expln_std_matches_stable_baselines3():
    head = StateDependent(3, (2,), 0.0, bounds=BOUNDS, expln=True)
    with torch.no_grad():
        head.log_std.copy_(torch.tensor([[-1.0, -0.5], [0.0, 0.5], [-2.0, 1.0]]))
    head.std.sum().backward()
    wanted = [[0.3678794, 0.6065307], [1.0, 1.4054655], [0.1353353, 1.6931472]]
    torch.testing.assert_close(head.std, torch.tensor(wanted))
    slopes = [[0.3678794, 0.6065307], [1.0, 0.6666662], [0.1353353, 0.4999998]]
    torch.testing.assert_close(head.log_std.grad, torch.tensor(slopes))


def policy(sample_freq: int = -1, num_envs: int = 3) -> StateDependentExploration:
    torch.manual_seed(0)
    env = make_env("Pendulum-v1", num_envs, seed=0)
    return StateDependentExploration(
        make_actor(env, (8,), continuous="gsde"), num_envs, sample_freq
    )


def act(policy: StateDependentExploration, kind: ExplorationType = ExplorationType.RANDOM):
    """Act three times on the same observations, and return the outputs."""
    observation = torch.linspace(-1, 1, 9).reshape(3, 3)
    with torch.no_grad(), set_exploration_type(kind):
        return [policy(TensorDict(observation=observation, batch_size=3)) for _ in range(3)]


def test_exploration_repeats_action_until_sampled_again():
    acting = policy()
    first, second, _ = act(acting)
    acting.sample()
    third, *_ = act(acting)
    assert torch.equal(first["action"], second["action"])
    assert (first["action"] != third["action"]).all()
    noise = first["action"] - first["loc"]
    assert noise.unique().numel() == 3  # each environment has its own matrix
    log_prob = Normal(first["loc"], first["scale"]).log_prob(first["action"]).sum(-1)
    torch.testing.assert_close(first["action_log_prob"], log_prob)


def test_exploration_samples_again_after_sample_freq_steps():
    first, second, third = (outputs["action"] for outputs in act(policy(sample_freq=2)))
    assert torch.equal(first, second)
    assert (second != third).all()


def test_exploration_has_no_noise_in_deterministic_actions():
    for outputs in act(policy(), ExplorationType.DETERMINISTIC):
        assert torch.equal(outputs["action"], outputs["loc"])


# ---------------------------------------------------------------------- recipes
def built(name: str, folder: Path | None = None, **changes):
    """Build a run of 4 iterations of 2 x 8 policy steps (ppo, a2c), or of 10 x 4 (sac)."""
    recipe = importlib.import_module(f"recipes.{name}")
    evaluation = {"evaluation_every": None, "evaluation_episodes": 1}
    steps = OnPolicySteps(
        total_policy_steps=64, steps_per_env=8, minibatch_size=8, update_epochs=1, **evaluation
    )
    if name == "sac":
        steps = OffPolicySteps(
            total_policy_steps=40, steps_per_env=4, learning_starts=16, minibatch_size=4,
            **evaluation,
        )  # fmt: skip
    env = EnvConfig("Pendulum-v1", 1 if name == "sac" else 2, max_episode_steps=10)
    settings = {
        "env": env, "steps": steps, "hidden_sizes": [8], "gsde": True, "progress": False,
        "log_dir": None if folder is None else str(folder),
    }  # fmt: skip
    return recipe.build(recipe.Config(**{**settings, **changes}))


def counted_matrices(trainer) -> list[int]:
    """Run the trainer, and return the number of different matrices acted with in each batch."""
    acting, seen, counts = trainer.collector.policy, [], []
    noise = acting.head.noise

    def look(columns, matrices):
        seen.append(matrices.clone())
        return noise(columns, matrices)

    acting.head.noise = look
    trainer.register_op("pre_collect", seen.clear)
    count = lambda batch: counts.append(len({tuple(m.flatten().tolist()) for m in seen}))  # noqa: E731
    trainer.register_op("pre_steps_log", count)
    trainer.run()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("ppo", {}, [1, 1, 1, 1]),
        ("ppo", {"gsde_sample_freq": 3}, [3, 3, 3, 3]),  # at steps 0, 3 and 6
        ("a2c", {"gsde_sample_freq": 4}, [2, 2, 2, 2]),
        ("sac", {}, [1, 0, 0, 0, 1, 1, 1, 1, 1, 1]),  # random at first, but one call finds shapes
        ("sac", {"gsde_at_warmup": True, "gsde_sample_freq": 1}, [4] * 10),
    ],
)
def test_recipe_samples_matrices_per_batch(name, settings, expected):
    trainer = built(name, collector_kwargs={"fast_policy": "module"}, **settings)
    assert counted_matrices(trainer) == expected
    if name == "sac":
        assert trainer.ledger.random_policy_steps == (0 if settings else 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collector", "different"),
    [("vector", 8), ("tensor", 8), ("torchrl", 8), ("async", 6)],  # 4 batches of 2 environments
)
def test_collectors_use_one_matrix_per_env_and_batch(collector, different):
    trainer = built("ppo", collector=collector, hidden_sizes=[])  # observations are the features
    found = []

    def look(batch):
        noise, features = batch["action"] - batch["loc"], batch["observation"]
        matrices = torch.linalg.lstsq(features, noise).solution
        torch.testing.assert_close(features @ matrices, noise, rtol=0, atol=1e-4)
        found.extend(matrices.flatten(1).tolist())

    trainer.register_op("pre_steps_log", look)
    trainer.run()
    assert len({round(first, 3) for first, *_ in found}) == different


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_resumed_gsde_run_equals_uninterrupted_run(name, tmp_path):
    settings = {"gsde_sample_freq": 2, "checkpoint_every": 16}
    whole = built(name, tmp_path / "whole", **settings)
    whole.run()
    first = sorted((tmp_path / "whole").glob("*/*/*/checkpoints/*"))[0]
    resumed = built(name, tmp_path / "resumed", **settings)
    resumed.load(first)
    assert 0 < resumed.policy_steps < whole.policy_steps
    resumed.run()
    wanted, found = whole.loss_module.state_dict(), resumed.loss_module.state_dict()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert resumed.collector.policy_path.name == "program"


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("ppo", {"gsde": False, "gsde_sample_freq": 4}, "gsde_sample_freq"),
        ("ppo", {"env": EnvConfig("CartPole-v1", 2)}, "gsde"),
        ("ppo", {"squash_actions": True}, "squash_actions"),
        ("sac", {"gsde": False, "gsde_at_warmup": True}, "gsde_at_warmup"),
        ("sac", {"gsde": False, "initial_log_std": -1.0}, "initial_log_std"),
    ],
)
def test_recipe_rejects_gsde_settings_without_effect(name, settings, field):
    with raises_setting(field):
        built(name, **settings)
