"""The recipes learn what small environments ask for, and do exactly what was planned."""

from __future__ import annotations

import functools
import importlib
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces

import recipes.a2c
import recipes.dqn
import recipes.ppo
import recipes.reinforce
import recipes.sac
import recipes.sac_discrete
import recipes.td3
from kit.evaluate import SavedRun
from kit.experiment import EnvConfig
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.tiny import Guess

CHOICE = spaces.Discrete(Guess.CHOICES)
SEVERAL = spaces.MultiDiscrete([Guess.CHOICES, Guess.CHOICES])
NUMBER = spaces.Box(-1.0, 1.0, (1,))
WORLDS: dict[str, dict[str, Any]] = {
    "Guess-v0": {"action_space": CHOICE},
    "GuessFromDict-v0": {"action_space": CHOICE, "dict_observation": True},
    "GuessSeveral-v0": {"action_space": SEVERAL},
    "GuessSeveralFromDict-v0": {"action_space": SEVERAL, "dict_observation": True},
    "GuessDict-v0": {"action_space": spaces.Dict({"one": CHOICE, "other": NUMBER})},
    "GuessNumber-v0": {"action_space": NUMBER},
}
for name, settings in WORLDS.items():
    if name not in gym.registry:
        gym.register(name, functools.partial(Guess, **settings))

BEST = float(Guess.STEPS)
"""Return of an episode in which every answer is right; one third of it by chance."""


@pytest.fixture
def ppo(tmp_path):
    """Build PPO; settings of the steps by their own names."""
    return functools.partial(built, recipes.ppo, OnPolicySteps, tmp_path)


@pytest.fixture
def sac(tmp_path):
    """Build SAC; settings of the steps by their own names."""
    return functools.partial(built, recipes.sac, OffPolicySteps, tmp_path)


def built(
    recipe: Any, steps_class: type, folder: Path, env: str | EnvConfig, **settings: Any
) -> Trainer:
    own = {n: settings.pop(n) for n in list(settings) if n in steps_class.__dataclass_fields__}
    defaults: dict[str, Any] = {"evaluation_every": None, "evaluation_episodes": 10}
    if isinstance(env, str):
        env = EnvConfig(id=env, num_envs=8 if recipe is recipes.ppo else 1)
    config = recipe.Config(
        env=env, steps=steps_class(**{**defaults, **own}), log_dir=str(folder), progress=False,
        **settings,
    )  # fmt: skip
    return recipe.build(config)


def learnt(trainer: Trainer) -> float:
    """Run and return the mean return of the final evaluation; the plan has to be kept."""
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert ledger.skipped_gradient_steps == 0 or "target_kl" in trainer.registered_modules
    return trainer.journal.latest["evaluation/return"]


# ---------------------------------------------------------------------- PPO learns
SHORT = {
    "total_policy_steps": 4_096, "steps_per_env": 32, "minibatch_size": 64, "update_epochs": 4,
    "hidden_sizes": [32], "learning_rate": 5e-3,
}  # fmt: skip


@pytest.mark.parametrize(
    "world", ["Guess-v0", "GuessFromDict-v0", "GuessSeveral-v0", "GuessSeveralFromDict-v0"]
)
def test_ppo_learns_discrete_actions(ppo, world):
    assert learnt(ppo(world, **SHORT)) == BEST


@pytest.mark.parametrize("world", ["GuessNumber-v0", "GuessDict-v0"])
def test_ppo_learns_continuous_actions(ppo, world):
    settings = {**SHORT, "total_policy_steps": 12_288, "initial_log_std": -1.0}
    assert learnt(ppo(world, **settings)) > 0.92 * BEST


@pytest.mark.parametrize(
    "change",
    [
        {"shared_backbone": True},
        {"loss": "kit.losses:KLPENPPOLoss"},
        {"loss": "PPOLoss"},
        {"target_kl": 0.05},
        {"lr_schedule": "cosine"},
        {"lr_schedule": "constant", "learning_rate": 2e-3},
        {"normalize_advantage": False},
        {"entropy_coeff": 0.01},
    ],
    ids=str,
)
def test_ppo_learns_with_other_settings(ppo, change):
    assert learnt(ppo("Guess-v0", **{**SHORT, **change})) == BEST


def test_ppo_learns_with_min_steps_batches(ppo):
    episodes = {"steps_per_env": None, "min_steps": 256}
    assert learnt(ppo("Guess-v0", **{**SHORT, **episodes})) == BEST


def test_ppo_balances_cartpole(ppo):
    pole = EnvConfig("CartPole-v1", 8, vectorization="tensor", normalize_observation=True)
    # Rounding differs between processors: after 24,576 policy steps it decides about the median.
    returns = [learnt(ppo(pole, total_policy_steps=40_960, seed=seed)) for seed in range(3)]
    assert statistics.median(returns) > 400.0


# ---------------------------------------------------------------------- PPO does what it says
def test_shared_backbone_stores_parameters_once(ppo):
    def count(shared: bool) -> int:
        loss = ppo("Guess-v0", **SHORT, shared_backbone=shared).loss_module
        return sum(parameter.numel() for parameter in loss.parameters())

    body, heads = 3 * 32 + 32, (32 * 3 + 3) + (32 + 1)
    assert count(shared=True) == body + heads
    assert count(shared=False) == 2 * body + heads


@pytest.mark.parametrize(
    ("lr_schedule", "rates"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("cosine", [1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
    ],
)
def test_lr_schedule_updates_learning_rate_every_iteration(ppo, lr_schedule, rates):
    trainer = ppo("Guess-v0", **{**SHORT, "total_policy_steps": 1_024}, lr_schedule=lr_schedule)
    used: list[float] = []
    trainer.register_op(
        "pre_optim_steps", lambda: used.append(float(trainer.optimizer.param_groups[0]["lr"]))
    )
    trainer.run()
    assert used == pytest.approx([5e-3 * rate for rate in rates], rel=1e-6)


def test_small_target_kl_skips_and_counts_gradient_steps(ppo):
    trainer = ppo("Guess-v0", **{**SHORT, "total_policy_steps": 1_024}, target_kl=1e-6)
    ledger = trainer.run()
    assert ledger.skipped_gradient_steps > 0
    assert ledger.gradient_steps + ledger.skipped_gradient_steps == 4 * 4 * (256 // 64)


def test_ppo_counts_exactly(ppo):
    trainer = ppo("Guess-v0", **{**SHORT, "total_policy_steps": 1_024, "minibatch_size": 100})
    ledger = trainer.run()
    assert ledger.iterations == 4
    assert ledger.gradient_steps == 4 * 4 * 3  # minibatches of 100, 100 and 56
    assert ledger.samples == 4 * 4 * 256
    assert ledger.update_epochs == 16
    assert ledger.episodes == 1_024 // Guess.STEPS
    assert (ledger.evaluations, ledger.evaluation_episodes) == (1, 10)


# ---------------------------------------------------------------------- SAC
SMALL = {
    "total_policy_steps": 140, "learning_starts": 40, "minibatch_size": 8, "hidden_sizes": [8],
    "evaluation_episodes": 1,
}  # fmt: skip


@pytest.mark.parametrize("n_step", [1, 3])
def test_sac_learns_continuous_actions(sac, n_step):
    trainer = sac(
        "GuessNumber-v0", total_policy_steps=700, learning_starts=100, minibatch_size=64,
        hidden_sizes=[32], learning_rate=5e-3, gamma=0.5, n_step=n_step,
    )  # fmt: skip
    assert learnt(trainer) > 0.9 * BEST


@pytest.mark.parametrize(
    ("ratio", "pretrain"),
    [(0.25, 0), (0.25, 3), (1, 0), (1, 17), (2.5, 0), (2.5, 1), ("1/3", 0), ("0.0625", 0)],
)
def test_replay_ratio_sets_exact_gradient_step_count(sac, ratio, pretrain):
    trainer = sac("GuessNumber-v0", **SMALL, replay_ratio=ratio, pretrain_steps=pretrain)
    ledger = trainer.run()
    training_steps = 140 - 39  # learning starts with the fortieth policy step
    expected = int(Fraction(ratio) * training_steps) + pretrain
    assert ledger.gradient_steps == trainer.plan.gradient_steps_after(140) == expected
    assert ledger.samples == 8 * expected
    assert ledger.random_policy_steps == 40
    assert len(trainer.replay_buffer) == 140


@pytest.mark.parametrize("n_step", [2, 5])
def test_n_step_rewards_sum_within_episode(sac, n_step):
    single, several = (
        sac("GuessNumber-v0", **SMALL, n_step=n, gamma=0.9, loss="torchrl.objectives:SACLoss")
        for n in (1, n_step)
    )
    for trainer in (single, several):
        assert trainer.run().gradient_steps == 101
    assert len(several.replay_buffer) == 140 - n_step  # the newest wait for what follows
    one = single.replay_buffer[:]["next", "reward"].flatten()[:40]  # actions at random: the same
    stored = several.replay_buffer[:]["next", "reward"].flatten()
    for step in range(40 - n_step):
        in_episode = min(n_step, Guess.STEPS - step % Guess.STEPS)
        expected = sum(0.9**k * one[step + k] for k in range(in_episode))
        torch.testing.assert_close(stored[step], expected)


def test_parallel_envs_share_replay_ratio(sac):
    env = EnvConfig(id="GuessNumber-v0", num_envs=4)
    trainer = sac(env, **SMALL, replay_ratio="3/8")
    ledger = trainer.run()
    assert ledger.iterations == 35
    assert ledger.gradient_steps == int(Fraction(3, 8) * (140 - 36))


# ---------------------------------------------------------------------- as they come
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_ppo_defaults_solve_cartpole(seed, tmp_path):
    trainer = recipes.ppo.build(
        recipes.ppo.Config(seed=seed, log_dir=str(tmp_path), progress=False)
    )
    assert learnt(trainer) >= 475.0
    assert trainer.ledger.policy_steps == 65_536


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_sac_defaults_swing_up_pendulum(seed, tmp_path):
    trainer = recipes.sac.build(
        recipes.sac.Config(seed=seed, log_dir=str(tmp_path), progress=False)
    )
    assert learnt(trainer) >= -180.0
    assert trainer.ledger.policy_steps == 20_000


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["a2c", "reinforce", "ppo_recurrent"])
def test_policy_gradient_defaults_solve_cartpole(name, seed):
    recipe = importlib.import_module(f"recipes.{name}")
    config = recipe.Config(seed=seed, log_dir=None, progress=False)
    config.steps.evaluation_episodes = 100
    trainer = recipe.build(config)
    assert learnt(trainer) >= 475.0
    assert trainer.ledger.policy_steps <= 100_000


@pytest.mark.parametrize("recipe", [recipes.a2c, recipes.reinforce], ids=["a2c", "reinforce"])
def test_policy_gradients_use_each_complete_batch_once(recipe):
    config = recipe.Config(log_dir=None, progress=False, hidden_sizes=[8])
    steps = config.steps
    steps.total_policy_steps, steps.evaluation_every, steps.evaluation_episodes = 400, None, 1
    steps.min_steps = steps.min_steps and 200
    ledger = recipe.build(config).run()
    assert ledger.gradient_steps == ledger.update_epochs == ledger.iterations
    assert ledger.samples == ledger.policy_steps


@pytest.mark.nightly
def test_dqn_defaults_solve_cartpole_and_save_best_policy(tmp_path):
    # One run of six or so unlearns it, with all settings that were tried.
    last, best = [], []
    for seed in range(5):
        trainer = recipes.dqn.build(
            recipes.dqn.Config(seed=seed, log_dir=str(tmp_path), progress=False)
        )
        assert trainer.run().policy_steps == 50_000
        for found, kept in ((last, False), (best, True)):
            saved = SavedRun(trainer.folder, best=kept)
            evaluator = saved.evaluator(100, seed=10_000 + seed)
            found.append(evaluator(0)["evaluation/return"])
            evaluator.close(), saved.close()
    assert min(best) >= 475.0, best
    assert sum(found >= 475.0 for found in last) >= 4, last


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_td3_defaults_swing_up_pendulum(seed, tmp_path):
    assert hundred_episodes(recipes.td3, seed, tmp_path) >= -180.0


def hundred_episodes(recipe: Any, seed: int, folder: Path) -> float:
    """The return after a run with the defaults of a recipe, over a hundred episodes."""
    config = recipe.Config(seed=seed, log_dir=str(folder), progress=False)
    config.steps.evaluation_every, config.steps.evaluation_episodes = None, 100
    return learnt(recipe.build(config))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, 0.995),
        ({"target_update_every": 50}, 0.0),
        ({"target_update_every": 50, "tau": 0.1}, 0.9),
    ],
)
def test_dqn_target_update_uses_tau_or_full_copy(given, kept):
    config = recipes.dqn.Config(log_dir=None, progress=False, **given)
    trainer = recipes.dqn.build(config)
    loss = trainer.loss_module
    target, online = loss.target_value_network_params.data, loss.value_network_params.data
    target.zero_()
    trainer.update.target_updater.step()
    torch.testing.assert_close(target.to_dict(), online.mul(1.0 - kept).to_dict())


def test_dqn_discounts_bootstrap_by_number_of_steps():
    """The return is R + gamma**m Q: m steps, fewer at the end of an episode; 0 Q after a fall."""

    def collected(n_step: int) -> Trainer:
        config = recipes.dqn.Config(
            env=EnvConfig(id="CartPole-v1", num_envs=1, max_episode_steps=20), log_dir=None,
            steps=OffPolicySteps(
                total_policy_steps=250, steps_per_env=1, learning_starts=250, minibatch_size=4,
                evaluation_every=None, evaluation_episodes=1,
            ),
            progress=False, hidden_sizes=[8], gamma=0.5, n_step=n_step,
        )  # fmt: skip
        trainer = recipes.dqn.build(config)
        trainer.run()
        return trainer

    single = collected(1).replay_buffer[:]  # the same actions, as they are at random
    several = collected(3)
    stored, loss = several.replay_buffer[:], several.loss_module
    for parameters, value in (
        (loss.value_network_params, 0.0), (loss.target_value_network_params, 8.0)
    ):  # fmt: skip
        parameters.data.zero_()
        constant_value = parameters.flatten_keys(".").values(True, True)
        next(leaf for leaf in constant_value if leaf.shape == (2,)).data.fill_(value)
    ends = single["next", "done"].flatten().tolist()
    falls = single["next", "terminated"].flatten().tolist()
    expected, found = [], []
    for first in range(len(stored)):
        last = next((k for k in range(first, first + 3) if ends[k]), first + 2)
        steps = last - first + 1
        rewards = sum(0.5**k for k in range(steps))
        expected.append(rewards + (0.0 if falls[last] else 0.5**steps * 8.0))
        with torch.no_grad():  # that far from the value of 0, the Huber loss is the distance - 0.5
            found.append(float(loss(stored[first : first + 1])["loss"]) + 0.5)
    assert found == expected
    assert len(stored) == 247
    cuts = [end and not fall for end, fall in zip(ends, falls)]
    assert any(falls[:247])
    assert any(cuts[:247])


@pytest.mark.parametrize(
    ("recipe", "env", "others"),
    [
        (recipes.dqn, "Pendulum-v1", r"not discrete .*Box.*, and dqn .*use recipes\.sac"),
        (recipes.td3, "CartPole-v1", r"not continuous .*Discrete.*, and td3 .*use recipes\.dqn"),
        (recipes.sac, "CartPole-v1", r"not continuous .*Discrete.*, and sac .*use recipes\.dqn"),
        (recipes.dqn, "GuessSeveral-v0", r"not discrete .*MultiDiscrete.*use recipes\.ppo, or"),
        (recipes.sac_discrete, "GuessSeveral-v0", r"not discrete .*MultiDiscrete"),
    ],
)
def test_build_rejects_unsupported_action_space(recipe, env, others, tmp_path):
    config = recipe.Config(env=EnvConfig(id=env, num_envs=1), log_dir=str(tmp_path), progress=False)
    with raises_setting("env.id"):
        recipe.build(config)


@pytest.mark.parametrize("recipe", [recipes.dqn, recipes.td3])
def test_short_runs_count_exactly_and_use_traced_update(recipe, tmp_path):
    config = recipe.Config(log_dir=str(tmp_path), progress=False, buffer_size=1_000)
    config.steps = OffPolicySteps(
        total_policy_steps=400, learning_starts=100, replay_ratio="1/2", minibatch_size=8,
        steps_per_env=4, evaluation_every=None, evaluation_episodes=2,
    )  # fmt: skip
    trainer = recipe.build(config)
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.gradient_steps) == (400, 152)
    assert not trainer.update.plain_reason
