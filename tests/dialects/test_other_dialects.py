"""pyrado, Stable-Baselines3, TorchRL's trainer, CleanRL and Dreamer, each with its surprises."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kit.dialects import SB3, CleanRL, Dreamer, DreamerPaper, Pyrado, PyradoGAE, TorchRL
from kit.steps import SettingError, StepPlan
from tests.errors import raises_setting


def gradient_steps(plan, last=None):
    return [plan.gradient_steps(k) for k in range(1, (last or plan.iterations) + 1)]


class TestPyrado:
    @pytest.mark.parametrize(
        ("period", "told"),
        [
            (1, "counts gradient steps, not iterations."),
            (5, "steps 1, 6, 11, ..., the kit after 5, 10, "),
        ],
    )
    def test_pyrado_notes_explain_target_update_interval(self, period, told):
        settings = Pyrado(
            algo="dql",
            target_update_intvl=period,
            env_max_steps=20,
            min_steps=20,
            memory_size=100,
            batch_size=8,
        )
        (note,) = [note for note in settings.notes() if note.startswith("target_update_intvl")]
        assert told in note

    def test_pyrado_notes_explain_differences_without_field(self):
        told = " ".join(Pyrado(algo="ppo", min_steps=20, env_max_steps=20).notes())
        assert "values plus standardised advantages" in told
        assert "Rollouts of env_max_steps are terminated" in told
        told = " ".join(Pyrado(algo="a2c", min_steps=20, env_max_steps=20).notes())
        assert "Monte Carlo returns, regardless of critic.lamda" in told

    def test_pyrado_dql_first_iteration_includes_random_warm_up(self):
        plan = Pyrado(
            algo="dql",
            max_iter=4,
            memory_size=100,
            num_init_memory_steps=30,
            num_updates_per_step=3,
            min_steps=10,
            batch_size=8,
            env_max_steps=20,
        ).to_plan()
        assert [plan.collected(k) for k in (1, 2)] == [40, 20]
        assert gradient_steps(plan) == [3, 3, 3, 3]
        assert plan.random_steps_until(10**9) == 40

    def test_pyrado_derives_updates_from_maximum_rollout_length(self):
        settings = {"algo": "sac", "memory_size": 200, "batch_size": 8, "env_max_steps": 20}
        plan = Pyrado(min_steps=30, episode_length=7, max_iter=3, **settings).to_plan()
        assert plan.frames_per_batch == 35
        assert plan.gradient_steps(2) == 2

    def test_pyrado_rejects_memory_size_not_above_batch_size(self):
        settings = {"algo": "dql", "min_rollouts": 1, "env_max_steps": 20, "memory_size": 20}
        with raises_setting("batch_size") as error:
            Pyrado(batch_size=20, num_updates_per_step=1, **settings).to_plan()
        works = error.value.works[0]
        assert Pyrado(batch_size=works, num_updates_per_step=1, **settings).to_plan()

    def test_pyrado_ppo_critic_has_separate_gradient_steps(self):
        settings = Pyrado(algo="ppo", min_steps=50, critic=PyradoGAE(num_epoch=3, batch_size=16))
        assert settings.critic_gradient_steps(60) == 12
        assert Pyrado(algo="ppo2", min_steps=50).critic_gradient_steps(60) == 0
        assert Pyrado(algo="ppo", min_steps=50, critic={"num_epoch": 1}).critic == PyradoGAE(
            num_epoch=1
        )

    def test_pyrado_svpg_makes_one_gradient_step_per_particle(self):
        plan = Pyrado(
            algo="svpg", num_particles=3, min_steps=50, batch_size=25, env_max_steps=20, max_iter=2
        ).to_plan()
        assert plan.after(2).policy_steps == 360
        assert plan.after(2).gradient_steps == 6

    def test_pyrado_after_reset_refills_buffer_randomly_or_by_policy(self):
        settings = {"algo": "sac", "min_steps": 10, "memory_size": 400, "env_max_steps": 10}
        assert Pyrado(**settings).after_reset().prefill_random
        refilled = Pyrado(**settings, use_trained_policy_for_refill=True).after_reset()
        assert not refilled.prefill_random

    def test_pyrado_plan_is_inexact_without_episode_length(self):
        assert not Pyrado(algo="ppo", min_steps=50, max_iter=3).to_plan().is_exact


class TestSB3:
    @pytest.mark.parametrize("below", [-1, -2])
    def test_sb3_negative_gradient_steps_equal_timesteps(self, below):
        plan = SB3(algo="sac", n_envs=4, gradient_steps=below, total_timesteps=400).to_plan()
        assert plan.replay_ratio == 1

    def test_sb3_ppo_rejects_zero_epochs(self):
        with raises_setting("n_epochs"):
            SB3(algo="ppo", n_epochs=0).to_plan()

    def test_sb3_a2c_has_no_epochs_or_minibatches(self):
        plan = SB3(algo="a2c", total_timesteps=50).to_plan()
        for name in ("n_epochs", "batch_size"):
            idle = SB3(algo="a2c", total_timesteps=50, **{name: 3})
            assert (idle.idle_settings(), idle.to_plan()) == ([name], plan)
        assert SB3.from_plan(plan).to_plan() == plan

    @pytest.mark.parametrize("of_one", [{"batch_size": 1}, {"n_steps": 1}])
    def test_sb3_ppo_rejects_minibatch_of_one_with_normalization(self, of_one):
        plan = SB3(algo="ppo", normalize_advantage=False, **of_one).to_plan()
        assert plan.minibatch_size == 1
        assert SB3.from_plan(plan, algo="ppo").to_plan() == plan
        with pytest.raises(SettingError, match="or normalize_advantage=False"):
            SB3(algo="ppo", **of_one).to_plan()

    def test_sb3_episode_rollouts_require_one_env(self):
        settings = {"algo": "sac", "train_freq": (2, "episode"), "gradient_steps": -1}
        plan = SB3(**settings, episode_length=5, learning_starts=7, total_timesteps=60).to_plan()
        assert gradient_steps(plan) == [10] * 6
        with raises_setting("train_freq"):
            SB3(**settings, n_envs=2).to_plan()

    def test_sb3_n_steps_does_not_count_off_policy(self):
        assert SB3(algo="sac", n_steps=3).to_plan() == SB3(algo="sac").to_plan()
        assert SB3(algo="ppo", n_steps=3).to_plan().steps_per_env == 3


class TestTorchRL:
    def test_torchrl_from_plan_rejects_offline_plan(self):
        offline = StepPlan(iterations=3, steps_per_env=0, gradient_steps_per_iteration=5)
        with pytest.raises(SettingError, match="each iteration collects"):
            TorchRL.from_plan(offline)

    def test_torchrl_total_frames_count_skipped_frames(self):
        plan = TorchRL(frames_per_batch=10, total_frames=60, frame_skip=2, algo="sac",
                       optim_steps_per_batch=1).to_plan()  # fmt: skip
        assert (plan.iterations, plan.total_policy_steps) == (3, 30)

    def test_torchrl_trains_during_random_actions(self):
        plan = TorchRL(frames_per_batch=10, total_frames=400, frame_skip=4, init_random_frames=40,
                       optim_steps_per_batch=1, algo="sac").to_plan()  # fmt: skip
        assert plan.first_training_iteration == 1
        assert plan.random_steps == 40

    @pytest.mark.parametrize(
        ("limit", "steps"),
        [(None, [6, 6, 6]), (5, [6, 6, 6]), (3, [3, 3, 3]), (2, [3, 3, 3]), (1, [2, 1, 2])],
    )
    def test_torchrl_pass_ending_at_limit_skips_next_epoch(self, limit, steps):
        plan = TorchRL(frames_per_batch=10, total_frames=30, batch_size=4, num_epochs=2,
                       sampler="without_replacement", iterate=True,
                       optim_steps_per_batch=limit).to_plan()  # fmt: skip
        assert gradient_steps(plan) == steps

    def test_torchrl_notes_report_frames_in_small_buffer(self):
        settings = TorchRL(
            frames_per_batch=8, total_frames=8, num_envs=2, buffer_size=4, algo="ppo"
        )
        assert settings.to_plan().train_on_newest == 4
        assert any("the newest frames of each environment" in note for note in settings.notes())

    def test_torchrl_minibatches_straddle_epochs_without_iterate(self):
        settings = {"frames_per_batch": 10, "total_frames": 20, "batch_size": 4, "num_epochs": 3}
        settings |= {"sampler": "without_replacement", "optim_steps_per_batch": 2}
        plan = TorchRL(**settings).to_plan()
        assert plan.minibatch_sizes(1) == [4, 4, 2, 4, 4, 2]

    def test_torchrl_growing_buffer_is_repermuted_after_growth(self):
        settings = TorchRL(frames_per_batch=6, total_frames=60, batch_size=4, buffer_size=20,
                           sampler="without_replacement", iterate=True, drop_last=True,
                           num_epochs=3, optim_steps_per_batch=3)  # fmt: skip
        plan = settings.to_plan()
        assert gradient_steps(plan) == [3, 6, 4, 8, 7, 8, 7, 8, 7, 8]
        assert TorchRL.from_plan(plan).to_plan() == plan
        assert any("permutation" in note for note in settings.notes())

    def test_torchrl_growing_buffer_rejects_uneven_minibatches(self):
        settings = {"frames_per_batch": 6, "total_frames": 60, "buffer_size": 20}
        settings |= {"sampler": "without_replacement", "optim_steps_per_batch": 1}
        with pytest.raises(SettingError, match="Try: 2, or drop_last=True"):
            TorchRL(**settings, batch_size=4).to_plan()
        assert TorchRL(**settings, batch_size=2).to_plan()
        assert TorchRL(**settings, batch_size=4, drop_last=True).to_plan()

    def test_torchrl_random_sampler_requires_optim_steps_per_batch(self):
        with pytest.raises(SettingError, match="never ends"):
            TorchRL(algo="sac", optim_steps_per_batch=None).to_plan()


class TestCleanRL:
    def test_cleanrl_ppo_rounds_iterations_down(self):
        plan = CleanRL(algo="ppo").to_plan()
        assert plan.iterations == 976
        assert plan.minibatch_sizes(1) == [128] * 16

    def test_cleanrl_uneven_minibatches_add_smaller_minibatch(self):
        plan = CleanRL(algo="ppo", num_envs=1, num_steps=10, num_minibatches=3).to_plan()
        assert plan.minibatch_sizes(1) == [3, 3, 3, 1] * 4

    def test_cleanrl_dqn_trains_at_zero_based_multiples(self):
        plan = CleanRL(algo="dqn", total_timesteps=60, learning_starts=20, train_frequency=10)
        steps = gradient_steps(plan.to_plan())
        assert [k for k, due in enumerate(steps, 1) if due] == [31, 41, 51]

    def test_cleanrl_sac_counts_one_step_for_all_envs(self):
        plan = CleanRL(algo="sac", num_envs=2, total_timesteps=100, learning_starts=10).to_plan()
        assert plan.total_policy_steps == 200
        assert plan.random_steps == 20
        assert plan.first_training_iteration == 12


class TestDreamer:
    def test_dreamer_train_ratio_1024_is_replay_ratio_one(self):
        plan = Dreamer(train_ratio=1024, steps=10**6).to_plan()
        assert plan.replay_ratio == 1

    def test_dreamer_negative_ratio_trains_once_per_transition(self):
        plan = Dreamer(envs=1, train_ratio=-1, batch_size=2, batch_length=4, steps=60).to_plan()
        assert gradient_steps(plan)[10:14] == [0, 1, 1, 1]
        assert Dreamer(train_ratio=0, steps=10**5).to_plan().after(6250).gradient_steps == 0

    def test_dreamer_default_run_is_counted_in_closed_form(self):
        plan = Dreamer().to_plan()
        assert plan.after(plan.iterations).gradient_steps == 312_499_937

    def test_dreamer_paper_loop_converts_to_interleaved_loop(self):
        paper = DreamerPaper(steps=50_000)
        loop, interleaved = paper.to_plan(), paper.interleaved()
        assert loop.collects_episodes
        assert loop.frames_per_batch == 500
        assert gradient_steps(loop, 3) == [100, 100, 100]
        assert interleaved.replay_ratio == Fraction(1, 5)
        assert interleaved.frames_per_batch == 1
        end = loop.after(loop.iterations)
        other = interleaved.after(interleaved.iterations)
        assert (end.policy_steps, end.random_policy_steps) == (25_000, 2_500)
        assert (other.policy_steps, other.random_policy_steps) == (25_000, 2_500)
        assert end.gradient_steps == other.gradient_steps == 4_600

    def test_dreamer_from_plan_rejects_world_size_above_one(self):
        plan = StepPlan(iterations=3, world_size=2, replay_ratio=1, minibatch_size=4)
        with raises_setting("world_size"):
            Dreamer.from_plan(plan)


@pytest.mark.parametrize("algo", ["dqn", "dqn_atari", "ddpg", "ddpg_continuous_action"])
def test_cleanrl_dqn_and_ddpg_reject_multiple_envs(algo):
    with raises_setting("num_envs"):
        CleanRL(algo=algo, num_envs=2).to_plan()


@pytest.mark.parametrize(
    ("algo", "field"),
    [("sac", "learning_rate"), ("td3", "target_network_frequency"), ("ddpg", "policy_lr")],
)
def test_cleanrl_lists_field_unused_by_algorithm(algo, field):
    assert CleanRL(algo=algo, **{field: 2}).idle_settings() == [field]
    assert CleanRL(algo="td3").resolved().learning_rate == 3e-4


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_cleanrl_dqn_notes_mention_squared_loss(algo):
    told = "mean of squared errors" in " ".join(CleanRL(algo=algo).notes())
    assert told == (algo == "dqn")


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_pyrado_rejects_non_mapping_critic(algo):
    with raises_setting("critic"):
        Pyrado(algo=algo, critic=3).resolved()


def test_pyrado_notes_report_run_without_training():
    note = "max_iter=0 is valid, but trains nothing."
    assert note in Pyrado(max_iter=0, min_steps=10).notes()
    assert note not in Pyrado(max_iter=1, min_steps=10).notes()
