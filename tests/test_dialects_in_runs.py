"""Settings in the words of other libraries make real runs that do what the plan says."""

from __future__ import annotations

from typing import Any

import pytest

from kit.dialects import (
    SB3,
    CleanRL,
    Dreamer,
    DreamerPaper,
    Nip,
    Pyrado,
    Sheeprl,
    Tianshou,
    Tianshou2,
    TorchRL,
)
from kit.experiment import EnvConfig
from recipes import ppo, sac

EPISODE = 7  # policy steps of every episode of the environment below

ON_POLICY = {
    "sheeprl": Sheeprl(total_steps=100, rollout_steps=8, num_envs=3, per_rank_batch_size=10,
                       update_epochs=2),
    "tianshou": Tianshou(num_epochs=2, step_per_epoch=40, step_per_collect=15, num_train_envs=2,
                         batch_size=6, repeat_per_collect=2, num_test_episodes=2),
    "tianshou, start steps": Tianshou(num_epochs=1, step_per_epoch=40, step_per_collect=20,
                                      num_train_envs=2, batch_size=8, start_timesteps=10),
    "tianshou2": Tianshou2(max_epochs=2, epoch_num_steps=40, collection_step_num_env_steps=20,
                           num_training_envs=2, batch_size=8, update_step_num_repetitions=2),
    "pyrado": Pyrado(max_iter=3, min_steps=20, num_epoch=2, batch_size=9, episode_length=EPISODE),
    "nip": Nip(frames_per_batch=40, steps_per_env_per_iteration=8, num_iterations=3, num_epochs=2,
               minibatch_size=12, num_test_iterations=1),
    "sb3": SB3(total_timesteps=100, n_envs=3, n_steps=10, batch_size=8, n_epochs=2),
    "torchrl": TorchRL(frames_per_batch=20, total_frames=60, num_epochs=2, optim_steps_per_batch=3,
                       batch_size=8, num_envs=2),
    "cleanrl": CleanRL(total_timesteps=96, num_envs=2, num_steps=8, num_minibatches=2,
                       update_epochs=2),
}  # fmt: skip

OFF_POLICY = {
    "sheeprl": Sheeprl(total_steps=60, learning_starts=10, replay_ratio=0.3, num_envs=2,
                       per_rank_batch_size=4, per_rank_pretrain_steps=3),
    "sheeprl 0.5.7": Sheeprl(total_steps=60, learning_starts=10, replay_ratio=0.3, num_envs=2,
                             per_rank_batch_size=4, version="0.5.7"),
    "tianshou": Tianshou(num_epochs=2, step_per_epoch=20, step_per_collect=5, num_train_envs=2,
                         update_per_step=0.5, batch_size=4, start_timesteps=8,
                         start_timesteps_random=True),
    "pyrado": Pyrado(max_iter=4, memory_size=200, num_init_memory_steps=30, num_updates_per_step=3,
                     min_steps=10, batch_size=4, episode_length=EPISODE),
    "dreamer": Dreamer(steps=60, train_ratio=2, batch_size=2, batch_length=4, envs=2),
    "dreamer's paper": DreamerPaper(steps=5 * EPISODE, seed_episodes=2, collect_interval=3,
                                    action_repeat=1, episode_length=EPISODE, batch_size=2,
                                    sequence_length=1),
    "sb3": SB3(total_timesteps=61, n_envs=2, train_freq=2, gradient_steps=-1, learning_starts=9,
               batch_size=4),
    "torchrl": TorchRL(frames_per_batch=10, total_frames=50, init_random_frames=15,
                       optim_steps_per_batch=3, batch_size=4),
    "cleanrl": CleanRL(total_timesteps=60, learning_starts=10, batch_size=4),
}  # fmt: skip


def rows_of(recipe: Any, steps: Any, folder: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Run a recipe and return its plan and one row for each iteration."""
    config = recipe.Config(
        env=EnvConfig(id="Pendulum-v1", max_episode_steps=EPISODE),
        steps=steps, hidden_sizes=[8], runs=str(folder), progress=False, log_every=1,
        checkpoint_every=10**9,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    trainer = recipe.build(config)
    trainer.register_op("log_row", lambda row: rows.append(dict(row)))
    trainer.run()
    return trainer.plan, rows


def assert_as_planned(plan: Any, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["iterations"]]
    assert [row["iterations"] for row in rows] == list(range(1, plan.iterations + 1))
    counted = ("policy_steps", "random_policy_steps", "gradient_steps", "evaluations")
    for row in rows:
        expected = plan.after(row["iterations"])
        assert {n: row[n] for n in counted} == {n: getattr(expected, n) for n in counted}
        if plan.minibatch_size is not None:
            assert row["samples"] == expected.samples
        assert row["env_steps"] == expected.policy_steps


@pytest.mark.parametrize("name", ON_POLICY)
def test_ppo_does_what_the_words_of_another_library_mean(name: str, tmp_path: Any) -> None:
    assert_as_planned(*rows_of(ppo, ON_POLICY[name], tmp_path))


@pytest.mark.parametrize("name", OFF_POLICY)
def test_sac_does_what_the_words_of_another_library_mean(name: str, tmp_path: Any) -> None:
    assert_as_planned(*rows_of(sac, OFF_POLICY[name], tmp_path))
