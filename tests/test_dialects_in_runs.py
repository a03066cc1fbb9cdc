"""Settings in the words of other libraries make real runs that do what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kit.cli.launch import main
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
from kit.hooks import TimeLimit
from recipes import dqn, ppo, ppo_recurrent, reinforce, sac
from tests.errors import raises_setting

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
        steps=steps, hidden_sizes=[8], log_dir=str(folder), progress=False, log_every=1,
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
def test_ppo_run_matches_plan_of_dialect(name: str, tmp_path: Any) -> None:
    assert_as_planned(*rows_of(ppo, ON_POLICY[name], tmp_path))


@pytest.mark.parametrize("name", OFF_POLICY)
def test_sac_run_matches_plan_of_dialect(name: str, tmp_path: Any) -> None:
    assert_as_planned(*rows_of(sac, OFF_POLICY[name], tmp_path))


# ---------------------------------------------------------------------- what acts besides counts
NIP = {"frames_per_batch": 32, "steps_per_env_per_iteration": 8, "num_iterations": 4,
       "num_epochs": 1, "minibatch_size": 16, "num_test_iterations": 0}  # fmt: skip


def small(recipe: Any, steps: Any, **settings: Any) -> Any:
    """Settings of a small run that writes nothing."""
    env = EnvConfig(id="Pendulum-v1", max_episode_steps=EPISODE)
    quiet = {"log_dir": None, "progress": False, "hidden_sizes": [8], "env": env}
    return recipe.Config(**{**quiet, "steps": steps, **settings})


def test_nip_settings_reach_optimizer_and_advantages() -> None:
    trainer = ppo.build(small(ppo, Nip(**NIP, lr=0.5, gamma=0.5, lmbda=0.25, max_grad_norm=2.0)))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.5]
    assert float(trainer.advantage.gamma) == 0.5
    assert float(trainer.advantage.lmbda) == 0.25
    assert trainer.clip_norm == 2.0
    assert "set from nip: learning_rate=0.5, max_grad_norm=2.0, gamma=0.5" in trainer.plan.table()
    trainer.run()


def test_nip_sets_separate_learning_rate_for_hidden_layers() -> None:
    factors = {"actor": 0.5, "critic": 0.5}
    trainer = ppo.build(small(ppo, Nip(**NIP, lr=0.01, body_lr_factor=factors)))
    rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([0.01, 0.005])
    trainer.run()
    factors["critic"] = 0.25
    trainer = ppo.build(small(ppo, Nip(**NIP, lr=0.01, body_lr_factor=factors)))
    rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([0.01, 0.005, 0.0025])
    with raises_setting("critic_backbone_lr_scale"):
        ppo.build(small(ppo, Nip(**NIP, body_lr_factor=factors, use_shared_body=True)))
    told = " ".join(Nip(**NIP, body_lr_factor=factors).notes())
    assert "body_lr_factor applies to the recipe; in nip each agent has separate factors" in told


@pytest.mark.parametrize(("given", "clipped"), [(0.4, 0.4), (True, 0.2), (False, None)])
def test_nip_value_loss_settings_reach_loss(given: Any, clipped: float | None) -> None:
    trainer = ppo.build(small(ppo, Nip(**NIP, loss_critic_type="l1", clip_value=given)))
    loss = trainer.loss_module
    assert loss.loss_critic_type == "l1"
    assert loss.clip_value is None if clipped is None else loss.clip_value == pytest.approx(clipped)
    trainer.run()


@pytest.mark.parametrize(
    "given",
    [
        Nip(**NIP, clip_value=True),
        CleanRL(total_timesteps=64, num_envs=2, num_steps=8, num_minibatches=2, clip_vloss=True),
        Sheeprl(algo="ppo", total_steps=64, num_envs=2, rollout_steps=8, per_rank_batch_size=8,
                clip_vloss=True),
    ],
    ids=lambda given: given.NAME,
)  # fmt: skip
def test_boolean_clip_value_follows_clip_range_of_recipe(given: Any) -> None:
    config = small(ppo, given)
    config.clip_epsilon = 0.4
    loss = ppo.build(config).loss_module
    assert float(loss.clip_value) == float(loss.clip_epsilon) == pytest.approx(0.4)


@pytest.mark.parametrize("length", [None, EPISODE])
@pytest.mark.parametrize("collector", ["episode", "async"])
def test_pyrado_warmup_is_random_for_any_rollout_length(length: int | None, collector: str) -> None:
    steps = Pyrado(max_iter=2, memory_size=200, num_init_memory_steps=30, num_updates_per_step=1,
                   min_steps=10, batch_size=4, episode_length=length)  # fmt: skip
    ledger = sac.build(small(sac, steps, collector=collector)).run()
    assert (ledger.policy_steps, ledger.random_policy_steps) == (35 + 14, 35)


@pytest.mark.parametrize(
    "given",
    [
        Sheeprl(total_steps=64, rollout_steps=8, update_epochs=1),
        Pyrado(max_iter=2, min_steps=20, num_epoch=1),
        SB3(total_timesteps=64, n_steps=8, n_epochs=1, batch_size=8),
    ],
)
def test_dialect_epochs_apply_to_algorithm_missing_in_library(
    given: Any,
) -> None:
    trainer = reinforce.build(small(reinforce, given))
    assert trainer.plan.update_epochs == 1
    trainer.run()


def test_pyrado_settings_reach_sac() -> None:
    steps = Pyrado(max_iter=2, memory_size=200, num_init_memory_steps=30, num_updates_per_step=1,
                   min_steps=10, batch_size=4, episode_length=EPISODE, gamma=0.5, tau=0.75,
                   lr=0.25)  # fmt: skip
    trainer = sac.build(small(sac, steps))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.25]
    assert float(trainer.loss_module.value_estimator.gamma) == 0.5
    assert trainer.update.target_updater.eps == 0.75  # it keeps as much of the target
    assert trainer.replay_buffer._storage.max_size == 200


def test_recurrent_ppo_rejects_dialect_without_sequence_length() -> None:
    given = SB3(total_timesteps=64, n_steps=8, n_epochs=1, batch_size=8)
    with raises_setting("steps.sequence_length"):
        ppo_recurrent.build(small(ppo_recurrent, given))


def test_dialect_run_shorter_than_learning_starts_warns() -> None:
    given = SB3(algo="sac", total_timesteps=20, learning_starts=40)
    with pytest.warns(UserWarning, match="the run has only 20, so it never trains"):
        trainer = sac.build(small(sac, given))
    trainer.run()
    assert (trainer.ledger.policy_steps, trainer.ledger.gradient_steps) == (20, 0)


def test_sb3_episodes_of_unknown_length_train_once_per_timestep() -> None:
    given = SB3(algo="sac", total_timesteps=20, train_freq=(1, "episode"), gradient_steps=-1,
                learning_starts=9, batch_size=4, max_episode_steps=7)  # fmt: skip
    trainer = sac.build(small(sac, given))
    trainer.run()
    ledger = trainer.ledger
    assert (ledger.policy_steps, ledger.random_policy_steps) == (21, 9)
    assert ledger.gradient_steps == 14  # in the second and the third episode


SB3_DQN = {"algo": "dqn", "total_timesteps": 120, "batch_size": 4, "target_update_interval": 40}
CLEANRL_DQN = {"algo": "dqn", "total_timesteps": 120, "batch_size": 4, "train_frequency": 4}


@pytest.mark.parametrize(
    ("steps", "first", "told"),
    [
        (SB3(**SB3_DQN, learning_starts=10), 48, "first at 48 timesteps, not at a multiple of 40"),
        (SB3(**SB3_DQN, learning_starts=10, gradient_steps=-1), 48, "first at 48 timesteps"),
        (SB3(**SB3_DQN, learning_starts=3), 40, ""),
        (CleanRL(**CLEANRL_DQN, learning_starts=10, target_network_frequency=40), 49,
         "first at global step 48, not at a multiple of 40"),
        (CleanRL(**CLEANRL_DQN, learning_starts=40, target_network_frequency=40), 81, ""),
    ],
)  # fmt: skip
def test_notes_report_different_first_target_update(steps: Any, first: int, told: str) -> None:
    updated: list[int] = []
    config = small(dqn, steps)
    config.env.id = "CartPole-v1"
    trainer = dqn.build(config)
    targets = trainer.update._targets
    copy = targets._update
    targets._update = lambda: (updated.append(trainer.policy_steps), copy())
    trainer.run()
    assert updated[0] == first
    notes = " ".join(steps.notes())
    assert told in notes if told else "ecipes count" not in notes


@pytest.mark.parametrize(("reward", "epochs"), [(-1e9, 1), (1.0, 3)])
def test_tianshou_run_stops_after_epoch_that_reaches_reward(reward: float, epochs: int) -> None:
    steps = {"num_epochs": 3, "step_per_epoch": 40, "step_per_collect": 20, "num_train_envs": 2}
    given = Tianshou(**steps, batch_size=8, stop_rew=reward)
    trainer = ppo.build(small(ppo, given))  # returns of Pendulum are negative
    ledger = trainer.run()
    assert ledger.policy_steps == 40 * epochs
    assert ledger.evaluations == 2 + epochs  # tianshou 1.x tests twice before the first epoch
    assert (trainer.stop_reason is not None) == (epochs < 3)


def test_build_rejects_num_envs_that_contradicts_dialect() -> None:
    env = EnvConfig(id="Pendulum-v1", num_envs=5)
    with raises_setting("env.num_envs"):
        ppo.build(small(ppo, SB3(total_timesteps=64, n_envs=2, n_steps=16, batch_size=8), env=env))


def test_budget_below_one_batch_runs_only_final_evaluation() -> None:
    steps = Sheeprl(total_steps=30, rollout_steps=16, num_envs=2)
    ledger = ppo.build(small(ppo, steps)).run()
    assert (ledger.policy_steps, ledger.gradient_steps, ledger.evaluations) == (0, 0, 1)


def test_build_rejects_dialect_value_invalid_for_recipe() -> None:
    with raises_setting("learning_rate"):
        ppo.build(small(ppo, Nip(**NIP, lr=-1.0)))


def test_run_records_effective_settings_and_resume_keeps_them(
    tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"steps.{name}={value}" for name, value in NIP.items()]
    words += ["steps.lr=0.5", "steps.gamma=0.5", "lr_schedule=constant"]
    main(ppo.Config, ppo.build, ["steps=nip", *words, "hidden_sizes=[8]", "progress=false"])
    (run,) = (path.parent for path in tmp_path.rglob("config.yaml"))
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["learning_rate"], saved["gamma"]) == (0.5, 0.5)
    assert saved["steps"]["lr"] == 0.5
    assert saved["env"]["num_envs"] == 32 // 8
    assert "set from nip: learning_rate=0.5, gamma=0.5" in (run / "plan.txt").read_text()
    again: list[Any] = []

    def build(cfg: Any) -> Any:
        again.append(ppo.build(cfg))
        return again[-1]

    main(ppo.Config, build, [f"resume={run}", "progress=false"])
    assert [group["lr"] for group in again[0].optimizer.param_groups] == [0.5]
    assert float(again[0].advantage.gamma) == 0.5


def test_resume_in_python_uses_num_envs_of_dialect(tmp_path: Any) -> None:
    def config(n_envs: int = 2, **changes: Any) -> Any:
        steps = SB3(total_timesteps=64, n_envs=n_envs, n_steps=16, batch_size=8)
        run = {"log_dir": str(tmp_path), "progress": False, "hidden_sizes": [8]}
        return ppo.Config(steps=steps, **run, **changes)

    stopped = ppo.build(config(), hooks=[TimeLimit(1e-9)])
    assert stopped.run().policy_steps == 32
    with raises_setting("resume"):
        ppo.build(config(n_envs=4, resume=str(stopped.folder)))
    assert ppo.build(config(resume=str(stopped.folder))).run().policy_steps == 64


def test_error_names_episode_length_when_episode_ends_early():
    steps = Pyrado(max_iter=2, min_steps=20, num_epoch=1, batch_size=9, env_max_steps=500)
    with raises_setting("episode_length"):
        ppo.build(ppo.Config(steps=steps, log_dir=None, progress=False)).run()


def test_pyrado_rollout_limit_becomes_env_time_limit():
    steps = Pyrado(max_iter=2, min_steps=50, num_epoch=1, batch_size=10, env_max_steps=20)
    cfg = ppo.Config(steps=steps, log_dir=None, progress=False)
    cfg.env.id = "Pendulum-v1"  # whose episodes are 200 steps
    trainer = ppo.build(cfg)
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.episodes) == (120, 6)
    assert ledger.compare(trainer.plan) == []
