"""Recipes that learn from a data set: recording, counting, resuming, and what they learn."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDict
from torchrl import objectives
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import SoftUpdate

import kit.buffers.datasets
import recipes.sac
from kit.__main__ import main
from kit.buffers import PrioritizedSampler, as_minibatches, make_replay_buffer
from kit.buffers.dataset_writer import DatasetWriter
from kit.cli.record import RandomizedPolicy, _play, record
from kit.collectors import VectorCollector
from kit.config.environment import check_dataset
from kit.envs import make_env
from kit.evaluate import SavedRun
from kit.experiment import EnvConfig, OfflineSteps
from kit.hooks import Evaluator
from kit.losses import CQLLoss
from kit.modules import make_action_value, make_actor
from kit.modules.world import LatentActor, Player, make_world_model
from kit.steps import SettingError
from kit.trainer import Trainer
from kit.trainer.compatibility import in_priorities
from tests.errors import raises_setting
from tests.tiny import Guess, assert_equal, weights

CONTINUOUS = ["bc", "td3_bc", "iql", "cql"]


def transitions(rows: int = 200, ends: int = 20) -> Any:
    """Transitions of random actions in the pendulum, in episodes of ``ends`` steps."""
    env = make_env("Pendulum-v1", 1, seed=3, max_episode_steps=ends)
    collector = VectorCollector(env, None, frames_per_batch=rows)
    batch = next(iter(collector))[0].exclude("collector")
    collector.shutdown()
    return batch


@pytest.fixture
def stored(monkeypatch):
    """A data set without files."""
    rows = transitions()
    monkeypatch.setattr("kit.experiment.read_datasets", lambda folders: rows.clone())
    return rows


def built(name: str, max_episode_steps: int = 15, **changes: Any) -> Trainer:
    recipe = importlib.import_module(f"recipes.{name}")
    steps = OfflineSteps(
        gradient_steps=60, gradient_steps_per_iteration=10, minibatch_size=8, evaluation_every=30,
        evaluation_episodes=1,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "steps": steps, "hidden_sizes": [8, 8], "progress": False, "log_dir": None, "log_every": 20,
    }  # fmt: skip
    config = recipe.Config(**{**settings, **changes})
    config.env.max_episode_steps = max_episode_steps
    return recipe.build(config)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("name", CONTINUOUS)
def test_gradient_steps_match_eager_pytorch_bitwise(name):
    fast = built(name)
    ledger = fast.run()
    assert (ledger.policy_steps, ledger.gradient_steps, ledger.samples) == (0, 60, 480)
    assert ledger.evaluations == 2
    assert fast.update.plain_reason == ""
    eager = built(name, compile=False)
    eager.run()
    assert_equal(weights(fast), weights(eager))


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("name", CONTINUOUS)
def test_resumed_run_matches_uninterrupted_run(name, tmp_path):
    whole = built(name)
    whole.run()
    broken = built(name, log_dir=str(tmp_path))
    broken.register_op(
        "post_steps",
        lambda: broken.request_stop() if broken.ledger.gradient_steps == 40 else None,
    )
    broken.run()
    resumed = built(name, log_dir=str(tmp_path), resume=str(broken.folder))
    resumed.run()
    assert resumed.ledger.counters() == whole.ledger.counters()
    assert_equal(weights(resumed), weights(whole))


def test_bc_learns_discrete_actions(monkeypatch):
    collector = VectorCollector(make_env("CartPole-v1", 1, seed=3), None, frames_per_batch=300)
    rows = next(iter(collector))[0].exclude("collector")
    collector.shutdown()
    rows["action"] = (rows["observation"][:, 2] > 0).long()
    monkeypatch.setattr("kit.experiment.read_datasets", lambda folders: rows.clone())
    steps = OfflineSteps(gradient_steps=400, minibatch_size=64, evaluation_episodes=1)
    trainer = built("bc", env=EnvConfig("CartPole-v1", 1), steps=steps, learning_rate=1e-2)
    trainer.run()
    assert trainer.update.plain_reason == ""
    assert float(trainer.last_metrics["loss_bc"]) < 0.1


def test_dataset_statistics_normalize_data_and_evaluation(stored):
    trainer = built("iql")
    moments = trainer.evaluate.env.normalizer.observation["observation"]
    mean = stored["observation"].double().mean(0)
    torch.testing.assert_close(moments.mean, mean)
    trainer.run()
    assert torch.equal(moments.mean, mean)
    seen = trainer.replay_buffer[:]["observation"]
    torch.testing.assert_close(seen.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(3), atol=1e-3, rtol=0)
    raw = built("iql", normalize_data=False)
    raw.run()
    assert raw.evaluate.env.normalizer is None
    assert torch.equal(raw.replay_buffer[:]["observation"], stored["observation"])


def test_init_from_reuses_statistics_of_source_run(stored, monkeypatch, tmp_path):
    first = built("bc", log_dir=str(tmp_path))
    first.run()
    rows = given(monkeypatch, stored, observation=lambda seen: seen / 2 + 1)
    second = built("bc", log_dir=str(tmp_path), init_from=str(first.folder))
    second.run()
    resumed = built("bc", log_dir=str(tmp_path), resume=str(second.folder))
    for trainer in (second, resumed):
        known = trainer.evaluate.env.normalizer.statistics
        torch.testing.assert_close(known.observation.mean, stored["observation"].double().mean(0))
    seen = second.replay_buffer[:]["observation"]
    assert torch.equal(seen, second.evaluate.env.normalizer.apply(known, rows["observation"]))


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.usefixtures("stored")
def test_init_from_rejects_mismatched_normalize_data(theirs, tmp_path):
    built("bc", log_dir=str(tmp_path), normalize_data=theirs).run()
    with raises_setting("normalize_data") as refused:
        built("bc", log_dir=str(tmp_path), normalize_data=not theirs, init_from="latest")
    assert refused.value.works == [theirs]


# ---------------------------------------------------------------------- played without its data
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_saved_run_evaluates_without_its_dataset(name, best, stored, monkeypatch, tmp_path):
    trainer = built(name, log_dir=str(tmp_path / "runs"), dataset=["elsewhere"])
    trainer.run()
    moved = (tmp_path / "moved").resolve()
    trainer.folder.rename(moved)
    monkeypatch.undo()
    with raises_setting("dataset"):
        built(name, dataset=["elsewhere"])
    saved = SavedRun(moved, best=best)
    assert saved.gradient_steps in ((30, 60) if best else (60,))
    number = saved.gradient_steps // 30 - 1
    rows = (moved / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("evaluation/return")
    returns = [float(cells[column]) for cells in (r.split(",") for r in rows[1:]) if cells[column]]
    assert saved.trainer.evaluate(number)["evaluation/return"] == pytest.approx(returns[number])
    normalizer, own = (t.evaluate.env.normalizer.state_dict() for t in (saved.trainer, trainer))
    assert normalizer == own
    saved.close()


def test_saved_trainer_rejects_training_without_dataset(stored, tmp_path):
    trainer = built("bc", log_dir=str(tmp_path))
    trainer.run()
    with raises_setting("learning_starts"):
        SavedRun(trainer.folder).trainer.run()


# ---------------------------------------------------------------------- the losses of IQL and CQL
def test_iql_reports_negative_log_likelihood_not_entropy():
    loss, rows = built_loss("iql"), transitions(16)
    told = loss(rows.clone())
    with loss.actor_network_params.to_module(loss.actor_network):
        log_prob = loss.actor_network.get_dist(rows).log_prob(rows["action"])
    assert "entropy" not in told.keys()
    torch.testing.assert_close(told["negative_log_likelihood"], -log_prob.mean())


def penalty_of(num_random: int, *outputs: float) -> torch.Tensor:
    """The penalty of CQL where Q-values are zero and the policy has the same outputs everywhere."""
    loss = built_loss("cql")
    loss.qvalue_network_params.data.zero_()
    loss.actor_network_params.data.zero_()
    columns = loss.actor_network_params.flatten_keys(".").values(True, True)
    last_bias = next(leaf for leaf in columns if leaf.shape == (2,))
    last_bias.data.copy_(torch.tensor(outputs))
    loss.num_random = num_random
    rows = transitions(16).clone()
    loss.q_loss(rows)
    return loss.cql_loss(rows)[0]


def test_cql_penalty_matches_paper_within_action_bounds():
    """With Q-values that are zero it estimates the logarithm of the volume of the actions."""
    # A deviation of 1 before the tanh, so that all actions are likely.
    penalty = penalty_of(4_000, 0.0, 0.458)
    volume, actions = 4.0, 3 * 4_000  # torques are in [-2, 2]
    expected = 2 * torch.log(torch.tensor(volume * actions))  # of two critics
    torch.testing.assert_close(penalty, expected, atol=0.05, rtol=0)


def test_cql_penalty_uses_sampling_density_at_action_bounds():
    """It cannot be computed back from them; one that is too small would outweigh all others."""
    penalty = penalty_of(100, 12.0, -5.0)  # the largest torque, almost surely
    expected = 2 * torch.log(torch.tensor(4.0 * 100))  # of uniform actions, in [-2, 2]
    torch.testing.assert_close(penalty, expected)


def test_cql_penalty_is_independent_of_action_shape():
    penalties = []
    for shape in ((6,), (2, 3)):
        torch.manual_seed(0)
        env = make_env(lambda shape=shape: Guess(spaces.Box(-2, 2, shape, np.float32)), 4)
        actor = make_actor(env, (8,), continuous="tanh_normal", return_log_prob=False)
        networks = actor, make_action_value(env, (8,))
        loss = CQLLoss(*networks, action_spec=env.action_spec[0], target_entropy=-6.0)
        loss.make_value_estimator(gamma=0.9)
        SoftUpdate(loss, tau=0.1)
        penalties.append(loss(env.fake_tensordict())["loss_cql"])
    torch.testing.assert_close(*penalties)


@pytest.mark.parametrize(
    ("name", "torchrls"), [("iql", objectives.IQLLoss), ("cql", objectives.CQLLoss)]
)
def test_loss_writes_absolute_td_error_and_rejects_beta(name, torchrls):
    loss, rows = built_loss(name), transitions(16)
    torch.manual_seed(0)
    loss(rows)
    squared = rows.clone()
    torch.manual_seed(0)
    torchrls.forward(loss, squared)
    torch.testing.assert_close(rows["td_error"].square(), squared["td_error"])
    sampler = PrioritizedSampler(100, alpha=0.6, beta=0.4)
    buffer = as_minibatches(make_replay_buffer(100, 8, sampler=sampler))
    (found,) = in_priorities(buffer, loss)
    assert f"{torchrls.__name__} does not read" in found[2]
    assert found[4].startswith("use per_beta=0 in a recipe,")  # beta is no setting of one


def built_loss(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kit.experiment.read_datasets", lambda folders: transitions())
        return built(name, normalize_data=False).loss_module


# ---------------------------------------------------------------------- what is refused
def test_build_rejects_invalid_dataset_or_step_counts(stored, monkeypatch):
    with raises_setting("steps.gradient_steps"):
        built("bc", steps=OfflineSteps(gradient_steps=25, gradient_steps_per_iteration=10))
    with raises_setting("dataset"):
        built("bc", env=EnvConfig("CartPole-v1", 1))
    with raises_setting("loss"):
        built("bc", loss="kit.losses:LikelihoodBCLoss")
    with raises_setting("dataset"):
        built("bc", dataset="few-v0")
    monkeypatch.undo()
    with raises_setting("dataset"):
        built("bc")


@pytest.mark.usefixtures("stored")
def test_resume_accepts_moved_dataset(tmp_path):
    first = built("bc", log_dir=str(tmp_path), dataset=["before"])
    first.run()
    settings = {"log_dir": str(tmp_path), "resume": str(first.folder)}
    assert built("bc", dataset=["after"], **settings).ledger.gradient_steps == 60
    with raises_setting("resume"):
        built("bc", dataset=["after"], learning_rate=0.5, **settings)
    shutil.rmtree(first.folder / "checkpoints")  # it would begin again, with anything
    with raises_setting("resume"):
        built("bc", dataset=["after"], **settings)


def test_resume_rejects_different_dataset(stored, monkeypatch, tmp_path):
    first = built("bc", log_dir=str(tmp_path))
    first.run()
    monkeypatch.setattr("kit.experiment.read_datasets", lambda folders: stored[:100].clone())
    with pytest.raises(SettingError, match="trained on a different dataset, of 200 transitions"):
        built("bc", log_dir=str(tmp_path), resume=str(first.folder))
    for key, change in {
        "action": torch.neg,
        ("next", "reward"): torch.neg,
        ("next", "terminated"): torch.logical_not,
        ("next", "observation"): torch.neg,
        "observation": lambda seen: seen.flip(0),  # of the same sum
    }.items():
        rows = stored.clone()
        rows[key] = change(rows[key])
        given(monkeypatch, rows)
        with pytest.raises(SettingError, match="trained on a different dataset"):
            built("bc", log_dir=str(tmp_path), resume=str(first.folder))


def given(monkeypatch, rows: Any, **changes: Any) -> Any:
    """The rows as a data set without files, with other entries."""
    rows = rows.clone()
    for key, value in changes.items():
        for part in (rows, rows["next"]) if key == "observation" else (rows,):
            part.set(key, value(part[key]))
    monkeypatch.setattr("kit.experiment.read_datasets", lambda folders: rows.clone())
    return rows


@pytest.mark.parametrize("name", CONTINUOUS)
def test_recipe_casts_float64_dataset_to_float32(name, stored, monkeypatch):
    given(monkeypatch, stored, observation=torch.Tensor.double, action=torch.Tensor.double)
    trainer = built(name)
    sampled = trainer.replay_buffer[:]
    assert {sampled[key].dtype for key in ("observation", "action")} == {torch.float32}
    assert trainer.run().gradient_steps == 60


@pytest.mark.parametrize("key", ["observation", "action"])
def test_build_rejects_integer_dataset(stored, monkeypatch, key):
    given(monkeypatch, stored, **{key: torch.Tensor.long})
    with raises_setting("dataset") as refused:
        built("bc", dataset=["here"])
    assert "\n" not in str(refused.value)


def test_build_rejects_custom_buffer_with_normalize_data(stored):
    recipe = importlib.import_module("recipes.bc")
    own = make_replay_buffer(200, None)
    own.extend(stored)
    config = recipe.Config(progress=False, log_dir=None)
    with raises_setting("normalize_data"):
        recipe.build(config, buffer=own)
    config.normalize_data = False
    assert recipe.build(config, buffer=own).buffer is own


def test_build_rejects_dataset_actions_outside_bounds(stored, monkeypatch):
    widest = float(stored["action"].abs().max())
    given(monkeypatch, stored, action=lambda action: action * 2.5 / widest)
    with raises_setting("dataset"):
        built("bc")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_check_dataset_accepts_integer_actions_at_bounds(dtype):
    """A difference of bytes is a byte."""
    low, high = (0, 255) if dtype is np.uint8 else (-128, 127)
    env = make_env(lambda: Guess(spaces.Box(low, high, (2,), dtype)), 1)
    seen = torch.zeros(3, 3)
    action = torch.from_numpy(np.array([[low, high], [0, 1], [high, low]], dtype))
    rows = TensorDict({"observation": seen, "action": action, "next": {"observation": seen}}, [3])
    check_dataset(env, rows, ["here"])
    if dtype is np.int64:
        rows["action"][1] = 200
        with raises_setting("dataset"):
            check_dataset(env, rows, ["here"])


def test_build_clamps_actions_slightly_outside_bounds(stored, monkeypatch):
    widest = float(stored["action"].abs().max())
    rows = given(monkeypatch, stored, action=lambda action: action * 2.0001 / widest)
    sampled = built("bc").replay_buffer[:]
    assert torch.equal(sampled["action"], rows["action"].clamp(-2, 2))
    assert sampled["action"].abs().max() == 2


@pytest.fixture
def guess():
    """Three answers that are counted from 1, and questions from 5."""
    gym.register("kit/Guess-v0", lambda: Answers())
    yield "kit/Guess-v0"
    del gym.registry["kit/Guess-v0"]


class Answers(Guess):
    """A question is a number from 5 on, and an answer one from 1 on."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(3, start=1))
        self.observation_space = spaces.Discrete(3, start=5)

    def _ask(self) -> Any:
        super()._ask()
        return self.asked + 5


def answers(monkeypatch, rows: Any, first: int, question: int = 5) -> Any:
    """The rows with three answers, and three questions, from these numbers on."""

    def counted(values: Any, start: int) -> Any:
        return torch.arange(len(values)) % 3 + start

    starts = {"action": first, "observation": question}
    changes = {key: lambda v, start=start: counted(v, start) for key, start in starts.items()}
    return given(monkeypatch, rows, **changes)


def test_build_shifts_discrete_dataset_values_to_zero(stored, monkeypatch, guess):
    rows = answers(monkeypatch, stored, first=1)
    settings = {"env": EnvConfig(id=guess, num_envs=1), "normalize_data": False}
    trainer = built("bc", **settings)
    sampled = trainer.replay_buffer[:]
    assert torch.equal(sampled["action"], rows["action"] - 1)
    assert torch.equal(sampled["observation"], rows["observation"] - 5)
    assert torch.equal(sampled["next", "observation"], rows["next", "observation"] - 5)
    assert trainer.run().gradient_steps == 60


@pytest.mark.parametrize(("first", "question"), [(0, 5), (2, 5), (1, 4)])
def test_build_rejects_discrete_values_outside_env_spaces(
    stored, monkeypatch, guess, first, question
):
    answers(monkeypatch, stored, first, question)
    with raises_setting("dataset"):
        built("bc", env=EnvConfig(id=guess, num_envs=1), normalize_data=False)


def test_build_rejects_normalize_data_with_discrete_observations(guess):
    with raises_setting("normalize_data"):
        built("bc", env=EnvConfig(id=guess, num_envs=1))


# ---------------------------------------------------------------------- files
def needs_minari() -> Any:
    """Minari with the package of its files."""
    pytest.importorskip("h5py")
    return pytest.importorskip("minari")


def written_by_minari(
    folder: Path, episode: dict[str, Any], action: spaces.Space, *more: dict[str, Any]
) -> None:
    """A data set of an episode, or several, as Minari itself writes it."""
    seen = np.asarray(episode["observations"])
    box = spaces.Box(-9, 9, seen.shape[1:], seen.dtype)
    created_by_minari(folder, [episode, *more], box, action)


def created_by_minari(
    folder: Path, episodes: list[dict[str, Any]], observation: spaces.Space, action: spaces.Space
) -> None:
    """A data set of any episodes, or of none."""
    minari = needs_minari()
    make = minari.data_collector.EpisodeBuffer
    buffers = [make(id=number, **one) for number, one in enumerate(episodes)]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("MINARI_DATASETS_PATH", str(folder.parent))
        minari.create_dataset_from_buffers(
            folder.name, buffers, observation_space=observation, action_space=action
        )


def an_episode(actions: Any, observations: Any) -> dict[str, Any]:
    ends = np.arange(len(actions)) == len(actions) - 1
    rewards = np.ones(len(actions))
    flags = {"terminations": ends, "truncations": np.zeros_like(ends)}
    return {"observations": observations, "actions": actions, "rewards": rewards, **flags}


def test_read_datasets_casts_reals_and_keeps_discrete_actions(tmp_path):
    seen = np.linspace(0, 1, 12).reshape(4, 3)
    real, choice = tmp_path / "real-v0", tmp_path / "choice-v0"
    force = np.linspace(-1, 1, 3)[:, None]
    written_by_minari(real, an_episode(force, seen), spaces.Box(-1, 1, (1,), np.float64))
    written_by_minari(choice, an_episode(np.array([1, 3, 2]), seen), spaces.Discrete(3, start=1))
    rows = kit.buffers.datasets.read_datasets([str(real)])
    assert torch.equal(rows["observation"], torch.tensor(seen[:-1], dtype=torch.float32))
    assert torch.equal(rows["action"], torch.tensor(force, dtype=torch.float32))
    assert rows["next", "reward"].dtype == torch.float32
    assert kit.buffers.datasets.read_datasets([str(choice)])["action"].tolist() == [1, 3, 2]


def test_read_datasets_truncates_episode_without_end_flag(tmp_path):
    folder, force = tmp_path / "cut-v0", np.zeros((3, 1), np.float32)
    seen = np.ones((4, 2), np.float32)
    cut = an_episode(force, seen) | {"terminations": np.zeros(3, bool)}
    whole = an_episode(force, seen)
    written_by_minari(folder, cut, spaces.Box(-1, 1, (1,), np.float32), whole, cut)
    rows = kit.buffers.datasets.read_datasets([str(folder)])
    for name, ends in {"done": [2, 5, 8], "terminated": [5], "truncated": [2, 8]}.items():
        assert rows["next", name].squeeze(-1).nonzero().flatten().tolist() == ends
    demos = make_replay_buffer(9, 4, n_step=3, gamma=1.0)
    demos.extend(rows)
    assert demos.buffer[:]["next", "reward"].flatten().tolist() == [3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"observations": np.ones((3, 2))},
        {"rewards": np.ones(1)},
        {"rewards": np.array([0.0, np.inf, 0.0])},
        {"observations": np.full((4, 2), 1e300)},
        {"rewards": np.ones((3, 1))},
    ],
)
def test_read_datasets_rejects_malformed_or_infinite_episodes(tmp_path, changes):
    folder, force = tmp_path / "few-v0", np.zeros((3, 1), np.float32)
    episode = an_episode(force, np.ones((4, 2))) | changes
    written_by_minari(folder, episode, spaces.Box(-1, 1, (1,), np.float32))
    with raises_setting("dataset"):
        kit.buffers.datasets.read_datasets([str(folder)])


def test_read_datasets_rejects_dict_observations(tmp_path):
    folder, box = tmp_path / "few-v0", spaces.Box(-1, 1, (1,))
    one = np.zeros((4, 1), np.float32)
    episode = an_episode(one[1:], {"here": one, "there": one})
    created_by_minari(folder, [episode], spaces.Dict({"here": box, "there": box}), box)
    with raises_setting("dataset"):
        kit.buffers.datasets.read_datasets([str(folder)])


def test_read_datasets_loads_installed_dataset_by_id(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(SettingError, match=r"here/few-v0'.* contains no readable dataset"):
        kit.buffers.datasets.read_datasets(["minari:here/few-v0"])
    force = np.zeros((3, 1), np.float32)
    episode = an_episode(force, np.ones((4, 2)))
    written_by_minari(tmp_path / "here" / "few-v0", episode, spaces.Box(-1, 1, (1,)))
    assert len(kit.buffers.datasets.read_datasets(["minari:here/few-v0"])) == 3


def write(folder: Path, rows: Any, env: Any) -> int:
    with DatasetWriter(folder, env) as writer:
        return writer.write(rows, "random")


def test_read_datasets_returns_written_transitions(tmp_path):
    needs_minari()
    rows, folder = transitions(110, ends=20), tmp_path / "pendulum-random-v0"
    env = make_env("Pendulum-v1", 1)
    assert write(folder, rows, env) == 5
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    read = kit.buffers.datasets.read_datasets([str(folder)])
    assert len(read) == 100  # the last ten steps are no whole episode
    for key in read.keys(True, True):
        assert torch.equal(read[key], rows[key][:100]), key
    assert len(kit.buffers.datasets.read_datasets([str(folder), str(folder)])) == 200
    with raises_setting("to"):
        write(folder, rows, env)
    with raises_setting("dataset"):
        kit.buffers.datasets.read_datasets([str(tmp_path)])


def test_dataset_writer_restores_minari_path_variable(tmp_path, monkeypatch):
    needs_minari()
    monkeypatch.setenv("MINARI_DATASETS_PATH", "elsewhere")
    write(tmp_path / "few-v0", transitions(20, ends=20), make_env("Pendulum-v1", 1))
    assert os.environ["MINARI_DATASETS_PATH"] == "elsewhere"


def test_dataset_has_no_env_spec_for_tensor_env(tmp_path):
    needs_minari()
    env = make_env("Pendulum-v1", 1, vectorization="tensor")
    write(tmp_path / "tensor-v0", transitions(20, ends=20), env)
    assert metadata(tmp_path / "tensor-v0").env_spec is None


def metadata(folder: Path) -> Any:
    return needs_minari().MinariDataset(folder / "data")


def test_dataset_env_spec_recovers_recorded_env(tmp_path):
    needs_minari()
    env = make_env("Pendulum-v1", 1, max_episode_steps=7, g=5.0)
    write(tmp_path / "light-v0", transitions(20), env)
    again = metadata(tmp_path / "light-v0").recover_environment()
    assert again.unwrapped.g == 5.0
    assert again.spec.max_episode_steps == 7
    held = make_env("Pendulum-v1", 1, max_episode_steps=7, action_repeat=2)
    write(tmp_path / "held-v0", transitions(20), held)
    again = metadata(tmp_path / "held-v0").recover_environment()
    again.reset(seed=0)
    assert [again.step(np.zeros(1))[3] for _ in range(7)] == [False] * 6 + [True]


def test_dataset_stores_spaces_and_values_of_env(tmp_path):
    needs_minari()
    env = make_env(Answers, 1)
    batch = VectorCollector(env, None, frames_per_batch=8, seed=1).collect()[0]
    rows, folder = batch.exclude("collector"), tmp_path / "answers-v0"
    write(folder, rows, env)
    stored = metadata(folder)
    assert stored.action_space == spaces.Discrete(3, start=1)
    assert stored.observation_space == spaces.Discrete(3, start=5)
    (episode,) = stored.iterate_episodes()
    assert episode.actions.tolist() == (rows["action"] + 1).tolist()
    assert episode.observations[:-1].tolist() == (rows["observation"] + 5).tolist()
    read = kit.buffers.datasets.read_datasets([str(folder)])
    read = kit.buffers.datasets.cast_to_env_specs(read, env)
    assert torch.equal(read["action"], rows["action"])
    assert torch.equal(read["next", "observation"], rows["next", "observation"])


def test_dataset_writer_clamps_actions_to_bounds(tmp_path):
    needs_minari()
    rows = transitions(20)
    rows["action"] = rows["action"] * 10
    write(tmp_path / "wide-v0", rows, make_env("Pendulum-v1", 1))
    (episode,) = metadata(tmp_path / "wide-v0").iterate_episodes()
    assert np.array_equal(episode.actions, rows["action"].clamp(-2, 2).numpy())


def test_dataset_round_trip_preserves_images(tmp_path):
    needs_minari()
    env = make_env(Pictures, 1)
    batch = VectorCollector(env, None, frames_per_batch=8, seed=1).collect()[0]
    write(tmp_path / "pictures-v0", batch.exclude("collector"), env)
    read = kit.buffers.datasets.read_datasets([str(tmp_path / "pictures-v0")])
    assert torch.equal(read["observation"], batch["observation"])


class Pictures(Guess):
    """A question is a noisy picture."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(3))
        self.observation_space = spaces.Box(0, 255, (32, 32, 3), np.uint8)

    def _ask(self) -> Any:
        super()._ask()
        return self.np_random.integers(0, 256, (32, 32, 3), np.uint8)


# ---------------------------------------------------------------------- refused before it is played
@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("few", "few-v0"),
        ("few-v", "few-v-v0"),
        ("pendulum 0.5", "pendulum-0-5-v0"),
        ("v1.2-v0", "v1-2-v0-v0"),
    ],
)
def test_dataset_writer_rejects_invalid_minari_name(tmp_path, name, works):
    env = make_env("Pendulum-v1", 1)
    with raises_setting("to") as refused:
        DatasetWriter(tmp_path / name, env)
    assert refused.value.works == [str(tmp_path / works)]


def test_dataset_writer_names_entry_point_of_class_env(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "Fixed-v0", EnvSpec("Fixed-v0", FixedCartPole))
    wrapped = make_env("Fixed-v0", 1, max_episode_steps=9, action_repeat=2)
    found = DatasetWriter(tmp_path / "few-v0", wrapped)._spec
    assert found.entry_point == f"{__name__}:FixedCartPole"
    assert [one.name for one in found.additional_wrappers] == ["ActionRepeat"]


class FixedCartPole(CartPoleEnv):
    """Registered as a class."""


def test_dataset_writer_rejects_unsupported_envs(tmp_path, guess):
    folder = tmp_path / "few-v0"
    with raises_setting("env.id"):
        DatasetWriter(folder, make_env(guess, 1))
    several = spaces.Dict({"one": spaces.Discrete(2), "other": spaces.Discrete(2)})
    for env in (lambda: Guess(spaces.Discrete(3), dict_observation=True), lambda: Guess(several)):
        with raises_setting("env.id"):
            DatasetWriter(folder, make_env(env, 1))


@pytest.mark.parametrize("package", ["minari", "h5py"])
def test_dataset_writer_rejects_missing_package(tmp_path, monkeypatch, package):
    pytest.importorskip("minari")
    monkeypatch.setitem(sys.modules, package, None)
    with raises_setting("to"):
        DatasetWriter(tmp_path / "few-v0", make_env("Pendulum-v1", 1))


def test_failed_dataset_write_leaves_no_files(tmp_path, monkeypatch):
    minari = needs_minari()

    def full(*_: object, **__: object) -> None:
        (Path(os.environ["MINARI_DATASETS_PATH"]) / "few-v0").mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(minari, "create_dataset_from_buffers", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "few-v0", transitions(20), make_env("Pendulum-v1", 1))
    assert [*tmp_path.iterdir()] == []


def test_record_rejects_invalid_arguments_before_playing(stored, tmp_path, monkeypatch, capsys):
    run = built("bc", log_dir=str(tmp_path), normalize_data=False)
    run.run()
    monkeypatch.setattr("kit.cli.record._play", lambda *_: pytest.fail("it was played"))
    for name in ("few", "it-v0"):  # no version; exists
        (tmp_path / "it-v0").mkdir(exist_ok=True)
        with pytest.raises(SystemExit):
            main(["record", str(run.folder), "--to", str(tmp_path / name)])
        error = capsys.readouterr().err
        assert error.startswith(f"\nerror: to='{tmp_path / name}'")
        assert error.count("\n") == 2
    for share in ("nan", "-1", "2"):
        with pytest.raises(SystemExit):
            main(["record", str(run.folder), "--to", str(tmp_path / "few-v0"), f"--random={share}"])
        assert "error: random=" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["data", "running"])
def test_record_stores_raw_observations_of_normalized_policy(kind, stored, tmp_path):
    needs_minari()
    if kind == "data":
        trainer = built("iql", log_dir=str(tmp_path))
        trainer.run()
        run = SavedRun(trainer.folder)
    else:
        env = EnvConfig(id="Pendulum-v1", num_envs=1, normalize_observation=True)
        run = sac_run(tmp_path, 20, env=env, hidden_sizes=[8])
    folder = tmp_path / "few-v0"
    record(run, folder, episodes=1, random=0.0, seed=1)
    rows = kit.buffers.datasets.read_datasets([str(folder)])
    cos, sin, _ = rows["observation"].unbind(-1)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(len(rows)))
    normalizer = run.trainer.evaluate.env.normalizer
    seen = normalizer.apply(normalizer.statistics, rows["observation"])
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = run.trainer.evaluate.policy(TensorDict({"observation": seen}, [len(rows)]))
    torch.testing.assert_close(rows["action"], acted["action"])
    assert (seen - rows["observation"]).abs().max() > 0.1
    run.close()


# ---------------------------------------------------------------------- what is played
@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
def test_record_randomizes_requested_share_of_actions(tmp_path, random):
    run = sac_run(tmp_path, 20, hidden_sizes=[8])
    env = make_env("Pendulum-v1", 1, max_episode_steps=30, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = _play(env, run.trainer.evaluate, 2, random, 1)
    assert len(rows) == 60
    own = run.trainer.evaluate.policy(rows.select("observation"))["action"]
    same = (own - rows["action"]).abs().amax(-1) < 1e-3
    count = int((~same).sum())
    assert count in {0.0: range(1), 0.5: range(20, 41), 1.0: range(59, 61)}[random]
    run.close()


@pytest.mark.parametrize("kind", ["DETERMINISTIC", "RANDOM"])
def test_record_follows_exploration_type_of_evaluator(kind):
    env = make_env("Pendulum-v1", 1, max_episode_steps=30, seed=1)
    policy = make_actor(env, (8,), continuous="tanh_normal")
    evaluator = Evaluator(env.make_again(), policy, exploration_type=ExplorationType[kind])
    rows = _play(env, evaluator, 1, 0.0, 1)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        likeliest = policy(rows.select("observation"))["action"]
    assert torch.allclose(rows["action"], likeliest, atol=1e-4) == (kind == "DETERMINISTIC")


def test_world_model_stores_executed_random_action():
    env = make_env("CartPole-v1", 20)
    model = make_world_model(env, "nano")
    player = Player(model, LatentActor(model.code, model.features, model.size))
    rows = env.reset().update(player.make_tensordict_primer().primers.zero([20]))
    rows = RandomizedPolicy(player, env.action_spec, 1.0)(rows)
    assert torch.equal(rows["next", player.ACTION].argmax(-1), rows["action"])


def test_record_stores_unnormalized_rewards(tmp_path):
    needs_minari()
    env = EnvConfig(id="Pendulum-v1", num_envs=1, normalize_reward=True)
    run, folder = sac_run(tmp_path, 20, env=env, hidden_sizes=[8]), tmp_path / "few-v0"
    record(run, folder, episodes=1, random=0.5, seed=1)
    rows = kit.buffers.datasets.read_datasets([str(folder)])
    cos, sin, speed = rows["observation"].unbind(-1)
    cost = torch.atan2(sin, cos) ** 2 + 0.1 * speed**2 + 0.001 * rows["action"].squeeze(-1) ** 2
    torch.testing.assert_close(rows["next", "reward"].squeeze(-1), -cost, atol=1e-4, rtol=1e-4)
    run.close()


def sac_run(folder: Path, policy_steps: int, **settings: Any) -> Any:
    """A run of SAC, as it is saved."""
    config = recipes.sac.Config(log_dir=str(folder), progress=False, **settings)
    config.steps.total_policy_steps, config.steps.evaluation_every = policy_steps, None
    config.steps.evaluation_episodes, config.steps.learning_starts = 1, min(500, policy_steps)
    trainer = recipes.sac.build(config)
    trainer.run()
    return SavedRun(trainer.folder)


def test_record_writes_complete_episodes(tmp_path, capsys):
    needs_minari()
    run, folder = sac_run(tmp_path, 20, hidden_sizes=[8]), tmp_path / "few-v0"
    run.close()
    options = ["--episodes", "2", "--random", "0.5", "--seed", "1"]
    assert main(["record", str(run.folder), "--to", str(folder), *options]) == 0
    assert capsys.readouterr().out.endswith("2 episodes, 400 transitions\n")
    rows = kit.buffers.datasets.read_datasets([str(folder)])
    assert rows["next", "truncated"].squeeze(-1).nonzero().flatten().tolist() == [199, 399]
    assert torch.equal(rows["next", "observation"][:199], rows["observation"][1:200])


@pytest.mark.nightly
def test_offline_recipes_beat_bc_on_mixed_dataset(tmp_path):
    needs_minari()
    run, folders = sac_run(tmp_path, 5_000), []
    for number, random in enumerate([0.1, 0.5, 1.0]):
        folders.append(tmp_path / f"part{number}-v0")
        record(run, folders[-1], episodes=20, random=random, seed=number)
    run.close()
    returns = {}
    for name in CONTINUOUS:
        steps = OfflineSteps(gradient_steps=10_000, minibatch_size=256, evaluation_episodes=50)
        data = {"dataset": [str(folder) for folder in folders], "max_episode_steps": 200}
        trainer = built(name, **data, steps=steps, hidden_sizes=[64, 64], log_every=None)
        trainer.run()
        returns[name] = trainer.journal.latest["evaluation/return"]
    assert all(returns[name] > returns["bc"] for name in ("td3_bc", "iql", "cql")), returns
