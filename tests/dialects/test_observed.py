"""Every dialect says what the real library was seen to count."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

import kit.testing
from kit.dialects import SB3, Sheeprl
from kit.experiment import OnPolicySteps
from kit.testing import check_observed
from tests.dialects.recorded import check_case
from tests.errors import raises_setting

DATA = Path(__file__).parents[1] / "data"
FILES = [*sorted(DATA.glob("semantics/*.json")), *sorted(DATA.glob("observed/*.json"))]
CASES = [case for file in FILES for case in json.loads(file.read_text())]

PROSE = {"rule", "ratio_argument", "note_optimizers"}
"""Figures that explain themselves in words."""


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_dialect_matches_observed_library_counts(case):
    seen = check_case(copy.deepcopy(case))
    assert seen.differences == []
    assert seen.compared
    varying = {text.split(":")[0].split()[0] for text in case.get("nondeterministic", ())}
    assert set(seen.ignored) <= PROSE | varying
    assert bool(seen)


def test_check_case_reports_wrong_count():
    case = copy.deepcopy(next(case for case in CASES if case["id"] == "sheeprl-002"))
    case["observed"]["gradient_steps_total_per_rank"] += 1
    seen = check_case(case)
    assert len(seen.differences) == 1
    assert (
        "gradient_steps_total_per_rank: observed 305, but the dialect predicts 304"
        in seen.differences[0]
    )
    assert not seen


def test_check_case_lists_unknown_figure_as_ignored():
    case = copy.deepcopy(CASES[0])
    case["observed"]["phase_of_the_moon"] = 3
    assert "phase_of_the_moon" in check_case(case).ignored


def test_check_case_reports_mismatched_failures():
    fails = copy.deepcopy(next(case for case in CASES if "error" in case["observed"]))
    del fails["observed"]["error"]
    assert any("none was observed" in text for text in check_case(fails).differences)
    runs = copy.deepcopy(CASES[0])
    runs["observed"]["error"] = "ValueError('no')"
    assert any("the library fails" in text for text in check_case(runs).differences)


def test_check_case_accepts_truncated_list():
    case = copy.deepcopy(next(case for case in CASES if case["id"] == "sheeprl-002"))
    steps = case["observed"]["gradient_steps_per_iteration_per_rank"]
    case["observed"]["gradient_steps_per_iteration_per_rank"] = steps[:30]
    assert check_case(case).differences == []
    case["observed"]["gradient_steps_per_iteration_per_rank"] = steps[:3]
    assert check_case(case).differences


# ---------------------------------------------------------------------- a dialect of one's own
def test_check_observed_compares_figures_of_dialect():
    sac = SB3(algo="sac", total_timesteps=60, n_envs=4, learning_starts=12, gradient_steps=-1)
    observed = {"gradient_steps_total": 48, "random_action_policy_steps": 12, "walltime": 3.0}
    seen = check_observed(sac, observed, varying=["random_action_policy_steps"])
    assert seen.compared == ["gradient_steps_total"]
    assert seen.ignored == ["random_action_policy_steps", "walltime"]
    assert seen


def test_check_observed_reports_error_only_in_dialect_or_library():
    runs, fails = SB3(algo="sac", n_envs=4), SB3(algo="sac", n_envs=0)
    assert check_observed(fails, {"error": "ValueError('n_envs')"})
    assert not check_observed(runs, {"error": "ValueError('n_envs')"})
    (difference, *_) = check_observed(fails, {"iterations": 3}).differences
    assert "the dialect says n_envs=0" in difference


def test_check_observed_rejects_too_long_run():
    with raises_setting("iterations"):
        check_observed(Sheeprl(algo="sac", total_steps=10**9, replay_ratio=0.3), {})


# ---------------------------------------------------------------------- what is recorded
NOT_EVERYWHERE = {"world_size", "repeat_per_collect"}
"""Settings that some of the libraries, or some of their algorithms, do not read."""


@pytest.mark.parametrize("case", CASES[::29], ids=[case["id"] for case in CASES[::29]])
def test_check_case_reports_invalid_params_and_all_figures(case):
    figures = sorted(figures_of(case["observed"]))
    for name, given in case["params"].items():
        for value in (None, -1, 0, "x", {}):
            seen = check_case({**case, "params": {**case["params"], name: value}})
            accounted = [figure for figure in seen.compared + seen.ignored if figure != "error"]
            assert sorted(accounted) == figures
            refused = any("error: none was observed" in text for text in seen.differences)
            if value == "x" and type(given) is int and name not in NOT_EVERYWHERE:
                assert refused or "error" in case["observed"]


def figures_of(observed, prefix=""):
    """The names of the figures of a case; those of several runs with the name of the run."""
    for name, value in observed.items():
        if isinstance(value, dict) and name.endswith("_run"):
            yield from figures_of(value, f"{name}.")
        elif name != "error":
            yield prefix + name


@pytest.mark.parametrize("algo", ["world_peace", None, 3])
def test_check_case_reports_unknown_algorithm(algo):
    case = next(case for case in CASES if case["system"] == "sheeprl")
    (difference, *_) = check_case({**case, "algo": algo}).differences
    assert "error: none was observed" in difference
    assert "algo=" in difference


def case_called(name):
    return copy.deepcopy(next(case for case in CASES if case["id"] == name))


# ---------------------------------------------------------------------- what no record shows
def test_pyrado_evaluates_at_logger_print_interval():
    settings = {"max_iter": 7, "memory_size": 200, "num_init_memory_steps": 40, "min_steps": 10}
    settings |= {"num_updates_per_step": 1, "batch_size": 8, "env_max_steps": 10}
    case = {"system": "pyrado", "algo": "SAC", "params": settings | {"eval_intvl": 2}}
    every_second = {"eval_iterations": [0, 2, 4, 6], "eval_rollouts_total": 400}
    assert check_case({**case, "observed": every_second})
    case["params"] |= {"logger_print_intvl": 3}
    assert check_case({**case, "observed": {"eval_iterations": [0, 3, 6]}})
    assert not check_case({**case, "observed": every_second})


def test_pyrado_counts_policy_refill_as_training_samples():
    case = case_called("pyrado-020")
    case["params"]["use_trained_policy_for_refill"] = True
    roles = "samples_per_iteration_[role,rollouts,steps_returned,env_steps_executed]"
    assert [entry[0][0] for entry in case["observed"][roles]] == ["init", "train", "init", "train"]
    case["observed"][roles][2][0][0] = "train"
    case["observed"]["random_action_policy_steps"] = 40
    assert check_case(case)


def test_tianshou_stops_when_test_reaches_stop_rew():
    params = {"num_epochs": 4, "step_per_epoch": 20, "step_per_collect": 10, "num_train_envs": 2}
    params |= {"num_test_episodes": 1, "batch_size": 10, "episode_length": 5}
    case = {"system": "tianshou", "version": "1.1.0", "algo": "ppo", "params": params}
    whole = {"trainer_env_step": 80, "test_step_count": 6}
    assert check_case({**case, "observed": whole})
    stopped = {"trainer_env_step": 20, "test_step_count": 3}  # two initial tests, one epoch
    assert check_case({**case, "params": params | {"stop_rew": 5}, "observed": stopped})
    assert check_case({**case, "params": params | {"stop_rew": 6}, "observed": whole})


@pytest.mark.parametrize("version", ["0.5.0", "February 2024 (issue 226)", "source of 2024-02"])
def test_sheeprl_february_2024_loop_is_separate_version(version):
    params = {"num_envs": 1, "total_steps": 20, "learning_starts": 8, "train_every": 5}
    params |= {"per_rank_gradient_steps": 2, "per_rank_pretrain_steps": 7, "episode_length": 50}
    params |= {"per_rank_batch_size": 2, "per_rank_sequence_length": 4}
    # A countdown of five updates, from the first on; pretraining where learning starts.
    steps = [0] * 7 + [7] + [0] * 4 + [2] + [0] * 4 + [2, 0, 0]
    observed = {"gradient_steps_per_iteration_per_rank": steps, "random_action_policy_steps": 8}
    case = {"system": "sheeprl", "version": version, "algo": "dreamer_v3", "params": params}
    assert check_case({**case, "observed": observed})


def test_sb3_evaluates_within_rollout():
    often = SB3(algo="ppo", n_steps=6, batch_size=6, total_timesteps=42, eval_freq=3)
    assert often.to_plan().evaluations_after(7) == 14
    assert SB3.from_plan(often.to_plan()).to_plan() == often.to_plan()
    assert any("before gradient steps" in note for note in often.notes())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"algo": "ppo", "n_steps": 10}, "decrease from 0.9 to 0 of the initial"),
        (
            {"algo": "dqn", "train_freq": 40, "learning_starts": 0},
            "decrease from 0.6 to -0.2 of the initial",
        ),
        (
            {"algo": "dqn", "train_freq": 40, "learning_starts": 0},
            "progress of schedules is -0.2 at the last",
        ),
    ],
)
def test_sb3_notes_report_schedule_values_at_updates(settings, told):
    falling = SB3(total_timesteps=100, learning_rate="lin_1e-3", **settings)
    assert told in " ".join(falling.notes())
    constant = SB3(total_timesteps=100, learning_rate=1e-3, **settings)
    assert "of the initial value" not in " ".join(constant.notes())


@pytest.mark.parametrize(("freq", "told"), [(40, True), (2, False), (1, False)])
def test_sb3_notes_report_constant_epsilon_in_long_rollouts(freq, told):
    dqn = SB3(algo="dqn", total_timesteps=1_000, exploration_fraction=0.5, train_freq=freq)
    notes = " ".join(dqn.notes())
    assert ("constant for a rollout of 40 timesteps" in notes) == told
    assert ("Epsilon" in notes) == told


@pytest.mark.parametrize("recorded", [1_000, 1_500])
def test_check_observed_compares_complete_long_list(recorded):
    sac = SB3(algo="sac", total_timesteps=1_500, learning_starts=100, train_freq=1)
    steps = ([0] * 100 + [1] * 1_400)[:recorded]
    assert check_observed(sac, {"gradient_steps_per_iteration": steps})
    steps[900] = 2
    assert not check_observed(sac, {"gradient_steps_per_iteration": steps})


def test_check_observed_compares_counts_exactly_for_any_type():
    sac = SB3(algo="sac", total_timesteps=4_000_000, n_envs=4, learning_starts=0, gradient_steps=4)
    wanted = sac.to_plan().gradient_steps_after(1_000_000)
    for number in (int, float, np.int64, np.float64, str):
        assert check_observed(sac, {"gradient_steps_total": number(wanted)})
        assert not check_observed(sac, {"gradient_steps_total": number(wanted + 1)})


def test_check_observed_accepts_arrays_and_exceptions():
    sac = SB3(algo="sac", total_timesteps=60, n_envs=4, learning_starts=12, gradient_steps=4)
    steps = np.array([0, 0, 0, *[4] * 12])
    assert check_observed(sac, {"gradient_steps_per_iteration": steps})
    assert not check_observed(sac, {"gradient_steps_per_iteration": steps + 1})
    seen = check_observed(sac, {"error": ValueError("no")})
    assert seen.differences == ["error: the library fails with 'no'"]


def test_figures_of_rejects_inexact_plan():
    steps = OnPolicySteps(total_policy_steps=256, steps_per_env=None, min_steps=64)
    with raises_setting("iterations"):
        kit.testing.figures_of(steps.to_plan(num_envs=2))
