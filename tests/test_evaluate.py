"""A policy is measured over whole episodes, in environments of its own, with frozen statistics."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs.utils import ExplorationType

import kit.trainer.checkpoint
import recipes.dqn
import recipes.dreamerv3
import recipes.ppo
import recipes.sac
from kit.envs import make_env
from kit.envs.vector_env import env_seeds
from kit.evaluate import SavedPolicy, SavedRun, main
from kit.experiment import EnvConfig
from kit.hooks import Evaluator
from kit.modules import make_actor
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from kit.trainer.checkpoint import Checkpoints, _write_checksums
from tests.errors import raises_setting
from tests.tiny import Scripted
from tests.world.runs import build


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A short run of PPO with normalised observations."""
    config = recipes.ppo.Config(
        env=EnvConfig(num_envs=2, normalize_observation=True),
        steps=OnPolicySteps(
            total_policy_steps=256, steps_per_env=32, update_epochs=2, minibatch_size=32,
            evaluation_every=None, evaluation_episodes=3,
        ),
        hidden_sizes=[8], log_dir=str(tmp_path_factory.mktemp("runs")), progress=False,
    )  # fmt: skip
    trainer = recipes.ppo.build(config)
    trainer.run()
    assert trainer.folder is not None
    return trainer.folder


def command(capsys, *arguments: str, code: int = 0) -> str:
    if code:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        return capsys.readouterr().err
    main(arguments)
    return capsys.readouterr().out


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_evaluate_falls_back_to_cpu_when_device_is_missing(run, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "copied"
    shutil.copytree(run, folder)
    # Files of checkpoints say of each tensor where it was.
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: "cuda:99")
    for file in folder.glob("checkpoints/*/components/*/state.pt"):
        torch.save(torch.load(file, weights_only=True), file)
    for sums in folder.glob("checkpoints/*/checksums.txt"):
        _write_checksums(sums.parent)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("device: cpu", "device: cuda:99"))
    shown = command(capsys, str(folder), "--episodes", "2")
    assert "deterministic actions, on the CPU (cuda:99 is not available)" in shown
    assert shown.splitlines()[2:] == command(capsys, str(run), "--episodes", "2").splitlines()[2:]


def test_saved_run_evaluates_with_recipe_exploration_type(run, tmp_path):
    assert SavedRun(run).evaluator(1, seed=0).exploration_type is ExplorationType.DETERMINISTIC
    trainer = build(recipes.dreamerv3, tmp_path)
    trainer.run()
    saved = SavedRun(trainer.folder)
    assert saved.evaluator(1, seed=0).exploration_type is ExplorationType.RANDOM, "as published"
    saved.close()


# ---------------------------------------------------------------------- the command
def test_evaluate_prints_summary_and_leaves_run_unchanged(run, capsys):
    before = files_of(run)
    text = command(capsys, str(run), "--episodes", "5")
    assert text.startswith(f"{run}\nafter 256 policy steps, deterministic actions\nreturn ")
    number = r"[\d,.]+"
    assert re.search(
        rf"return {number} ± {number} \(minimum {number}, maximum {number}\) over 5 episodes of "
        rf"{number} policy steps on average\n$",
        text,
    )
    assert files_of(run) == before


def test_evaluate_prints_small_returns_and_extra_metrics(run, capsys, monkeypatch):
    measured = {"return": 0.04321, "return_std": 0.2, "return_min": 0.0, "return_max": 1.0}
    measured |= {"length": 1_234.5, "is_success": 0.25}
    named = {f"evaluation/{name}": value for name, value in measured.items()}
    monkeypatch.setattr(Evaluator, "__call__", lambda self, number: named)
    assert command(capsys, str(run)).endswith(
        "\nreturn 0.0432 ± 0.2 (minimum 0.0, maximum 1.0) over 100 episodes of "
        "1,234.5 policy steps on average\nis_success 0.25\n"
    )


def test_evaluate_repeats_results_only_for_same_seed(run, capsys):
    first = command(capsys, str(run), "--episodes", "4")
    assert command(capsys, str(run), "--episodes", "4") == first
    assert command(capsys, str(run), "--episodes", "4", "--seed", "1") != first


def test_evaluate_finds_latest_run(run, capsys):
    runs = run.parents[2]
    assert command(capsys, "latest", "--runs", str(runs), "--episodes", "1").startswith(str(run))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "run='nowhere': There is no such folder"),
        (["latest", "--runs", "nowhere"], "run='latest': There is no run in nowhere"),
        (["{run}", "--episodes", "0"], "episodes=0: The value must be at least 1"),
        (["{run}", "--seed", "-1"], "seed=-1: The value must be at least 0"),
    ],
)
def test_evaluate_prints_one_line_error_for_invalid_arguments(run, capsys, words, message):
    error = command(capsys, *(word.format(run=run) for word in words), code=1)
    assert error.startswith(f"\nerror: {message}")
    assert error.count("\n") == 2


def test_evaluate_rejects_run_without_checkpoint(run, capsys, tmp_path):
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    error = command(capsys, str(tmp_path), code=1)
    assert error == f"\nerror: run='{tmp_path}': The run has no checkpoint yet. Continue the run.\n"


def drop_at(monkeypatch, owner: Any, name: str, copy: Path) -> None:
    """Let a run replace its newest checkpoint by a later one at the first call of a function."""
    before, calls = getattr(owner, name), []

    def call(*arguments: Any, **named: Any) -> Any:
        if not calls:
            calls.append(name)
            *_, newest = sorted((copy / "checkpoints").iterdir())
            newest.rename(newest.with_name("checkpoint-000000000999"))
        return before(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("when", ["it is checked", "it is loaded", "its policy is loaded"])
def test_saved_run_loads_next_checkpoint_when_newest_is_replaced(when, run, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for older in sorted((copy / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(older)
    where = {
        "it is checked": (kit.trainer.checkpoint, "check_whole"),
        "it is loaded": (Checkpoints, "load"),
        "its policy is loaded": (Trainer, "load_policy"),
    }
    drop_at(monkeypatch, *where[when], copy)
    saved = SavedRun(copy)
    assert saved.policy_steps == 256
    saved.close()


@pytest.mark.parametrize("when", ["made", "drawn"])
def test_video_error_names_missing_package(run, capsys, tmp_path, monkeypatch, when):
    import gymnasium as gym
    from gymnasium.envs.classic_control import CartPoleEnv

    def missing(*_, **__):
        raise gym.error.DependencyNotInstalled("MoviePy is not installed")

    if when == "drawn":
        pytest.importorskip("moviepy")  # without it nothing is drawn
    where = (gym.wrappers, "RecordVideo") if when == "made" else (CartPoleEnv, "render")
    monkeypatch.setattr(*where, missing)
    error = command(capsys, str(run), "--episodes", "1", "--video", str(tmp_path / "v.mp4"), code=1)
    assert "needs a package that is not installed (MoviePy is not installed)" in error
    assert "pip install 'torchrl-kit[video]'" in error


def test_evaluate_writes_video_of_one_episode(run, capsys, tmp_path):
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    video = tmp_path / "new" / "cartpole.mp4"
    text = command(capsys, str(run), "--episodes", "1", "--video", str(video))
    assert text.splitlines()[-1].startswith(f"{video}: one episode, return ")
    from moviepy import VideoFileClip

    with VideoFileClip(str(video)) as clip:
        length = float(text.split("return ")[-1])  # CartPole gives 1 for each step
        assert clip.size == [600, 400]
        assert round(clip.duration * clip.fps) == length + 1  # a picture of the reset, too
        pictures = list(clip.iter_frames())
    assert any((one != pictures[0]).any() for one in pictures)  # something moves


# ---------------------------------------------------------------------- what a saved run has
def test_saved_run_restores_weights_and_frozen_statistics(tmp_path):
    config = recipes.sac.Config(
        env=EnvConfig(id="Pendulum-v1", num_envs=1, normalize_observation=True),
        steps=OffPolicySteps(
            total_policy_steps=60, learning_starts=20, minibatch_size=8, evaluation_every=None,
            evaluation_episodes=2,
        ),
        hidden_sizes=[8], log_dir=str(tmp_path), progress=False,
    )  # fmt: skip
    trainer = recipes.sac.build(config)
    trainer.run()
    assert trainer.folder is not None
    saved = SavedRun(trainer.folder)
    assert saved.policy_steps == 60
    ended, restored = trainer.loss_module.state_dict(), saved.trainer.loss_module.state_dict()
    assert all(torch.equal(ended[name], restored[name]) for name in ended)
    evaluator = saved.evaluator(2, seed=7)
    own = trainer.collector.env.normalizer.state_dict()
    learnt = {name: value for name, value in own.items() if name != "returns"}

    def statistics_of(normalizer):
        return {n: v for n, v in normalizer.state_dict().items() if n != "returns"}

    assert statistics_of(evaluator.env.normalizer) == learnt
    evaluator(0)
    assert statistics_of(evaluator.env.normalizer) == learnt
    evaluator.close()
    saved.close()


# ---------------------------------------------------------------------- the evaluator
def constant(action: int) -> TensorDictModule:
    def choose(observation):
        return torch.full(observation.shape[:1], action, dtype=torch.int64)

    return TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("copies", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("episodes", [1, 4, 7])
def test_evaluator_plays_requested_episode_count(copies, episodes):
    env = make_env(lambda: Scripted(length=5), copies)
    played = Evaluator(env, constant(0), episodes=episodes).play()
    assert len(played) == episodes
    assert all((one.length, one.episode_return) == (5, 5.0) for one in played)


@pytest.mark.parametrize("training", [True, False])
def test_evaluator_uses_eval_mode_and_restores_policy_mode(training):
    modes = set()

    class Constant(torch.nn.Module):
        def forward(self, observation):
            modes.add(self.training)
            return torch.zeros(observation.shape[:1], dtype=torch.int64)

    policy = TensorDictModule(Constant(), in_keys=["observation"], out_keys=["action"])
    policy.train(training)
    Evaluator(make_env(lambda: Scripted(length=5), 1), policy, episodes=1).play()
    assert modes == {False}
    assert {module.training for module in policy.modules()} == {training}


def test_evaluator_divides_episodes_evenly_among_envs():
    lengths = iter([2, 10])
    env = make_env(lambda: Scripted(length=next(lengths)), 2)
    evaluator = Evaluator(env, constant(0), episodes=4)
    assert sorted(one.length for one in evaluator.play()) == [2, 2, 10, 10]
    metrics = evaluator(0)
    assert metrics == {
        "evaluation/return": 6.0,
        "evaluation/return_std": 4.0,
        "evaluation/return_min": 2.0,
        "evaluation/return_max": 10.0,
        "evaluation/length": 6.0,
    }


class Remembers(Scripted):
    """Remembers the actions it was given."""

    given: ClassVar[set[int]] = set()

    def step(self, action):
        self.given.add(int(action))
        return super().step(action)


@pytest.mark.parametrize(
    ("kind", "chosen"), [(ExplorationType.DETERMINISTIC, {1}), (ExplorationType.RANDOM, {0, 1})]
)
def test_evaluator_applies_exploration_type(kind, chosen):
    Remembers.given = set()
    env = make_env(lambda: Remembers(length=40), 2)
    actor = make_actor(env, (8,))
    *_, bias = actor.parameters()
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.zero_()
        bias.copy_(torch.tensor([0.0, 0.1]))  # the second action is chosen in 52 of 100 steps
    Evaluator(env, actor, episodes=2, exploration_type=kind)(0)
    assert Remembers.given == chosen


def test_evaluator_seeds_each_evaluation_by_its_number():
    env = make_env("CartPole-v1", 3)
    evaluator = Evaluator(env, make_actor(env, (8,)), episodes=3, seed=5)
    zero, one = evaluator(0), evaluator(1)
    assert zero != one
    assert evaluator(0) == zero  # whatever was played in between
    other = Evaluator(env, evaluator.policy, episodes=3, seed=6)
    assert other(0) != zero


def test_evaluator_reports_unnormalized_returns():
    env = make_env(lambda: Scripted(length=5), 2, normalize_reward=True)
    metrics = Evaluator(env, constant(0), episodes=2)(0)
    assert metrics["evaluation/return"] == 5.0
    assert metrics["evaluation/return_std"] == 0.0


def test_statistics_update_only_in_training_env():
    train, test = (make_env("CartPole-v1", 2, normalize_observation=True) for _ in range(2))
    test.normalizer = train.normalizer
    train.rollout(20, break_when_any_done=False)
    assert train.normalizer is not None
    before = train.normalizer.state_dict()
    evaluator = Evaluator(test, make_actor(test, (8,)), episodes=4)
    evaluator(0)
    assert train.normalizer.state_dict() == before
    assert (train.training, test.training) == (True, False)
    train.rollout(5, break_when_any_done=False)
    key = "observation observation"
    assert train.normalizer.state_dict()[key]["count"] > before[key]["count"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [("sync", "observation"), ("async", "reward"), ("SyncVectorEnv", "observation")],
)
def test_evaluator_rejects_gymnasium_normalization_wrapper(kind, what):
    wrapper = getattr(gym.wrappers, f"Normalize{what.title()}")

    def make():
        return gym.wrappers.TimeLimit(wrapper(gym.make("CartPole-v1")), 9)

    if kind == "SyncVectorEnv":
        mode = gym.vector.AutoresetMode.SAME_STEP
        env = make_env(gym.vector.SyncVectorEnv([make], autoreset_mode=mode))
    else:
        env = make_env(make, vectorization=kind)
    with raises_setting("evaluate"):
        Evaluator(env, constant(1))
    env.close()


# ---------------------------------------------------------------------- elsewhere
def play(policy, env, seed: int) -> float:
    """One episode in an environment of Gymnasium."""
    observation, info = env.reset(seed=seed)
    policy.reset()
    total, done = 0.0, False
    while not done:
        action = policy(observation, info)
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, info = env.step(action)
        total, done = total + float(reward), terminated or truncated
    return total


@pytest.mark.parametrize("kind", ["ppo", "ppo_recurrent", "sac"])
def test_saved_policy_matches_evaluator_in_plain_gymnasium(kind, tmp_path):
    recipe = importlib.import_module(f"recipes.{kind}")
    on_policy = {"steps_per_env": 32, "update_epochs": 1, "minibatch_size": 64}
    steps: Any = OnPolicySteps(total_policy_steps=256, evaluation_every=None, **on_policy)
    if kind == "sac":
        steps = OffPolicySteps(total_policy_steps=60, learning_starts=30, evaluation_every=None)
    if kind == "ppo_recurrent":
        steps.sequence_length, steps.minibatch_size = 16, 8
    settings = {"log_dir": str(tmp_path), "progress": False, "steps": steps}
    trainer = recipe.build(recipe.Config(**settings))
    trainer.run()
    saved = SavedRun(str(trainer.folder))
    policy, evaluator = saved.policy(), saved.evaluator(1, seed=0)
    for number in range(3):
        evaluator.env.set_seed(number)
        (episode,) = evaluator.play(number)
        seed = int(np.random.SeedSequence((0, number)).generate_state(1)[0])
        (seed,) = env_seeds(seed, 1)
        for env in (policy.make_env(), gym.make(evaluator.env.name)):
            assert play(policy, env, seed) == pytest.approx(episode.episode_return, rel=1e-6)


@pytest.mark.parametrize("best", [False, True])
def test_saved_policy_samples_with_final_exploration(best, tmp_path):
    steps = OffPolicySteps(
        total_policy_steps=60,
        steps_per_env=1,
        learning_starts=30,
        minibatch_size=8,
        evaluation_episodes=1,
    )
    settings = {"hidden_sizes": [8], "log_dir": str(tmp_path), "progress": False, "steps": steps}
    trainer = recipes.dqn.build(recipes.dqn.Config(epsilon_end=0.0, **settings))
    trainer.run()
    saved = SavedRun(trainer.folder, best=best)
    greedy, sampling = saved.policy(), saved.policy(deterministic=False)
    seen = np.random.default_rng(0).normal(size=(20, 4))
    assert [sampling(one) for one in seen] == [greedy(one) for one in seen]


class NamedChoices(Scripted):
    """Two choices in each step, a mask of each in ``info``, and observations in a ``Dict``."""

    observation_space = gym.spaces.Dict({"count": Scripted.observation_space})
    action_space = gym.spaces.MultiDiscrete([2, 3])
    masks = np.array([0, 1], np.int8), np.array([0, 0, 1], np.int8)

    def reset(self, **kwargs):
        seen, _ = super().reset(**kwargs)
        return {"count": seen}, {"action_mask": self.masks}

    def step(self, action):
        seen, *rest, _ = super().step(action)
        return {"count": seen}, *rest, {"action_mask": self.masks}


@pytest.mark.parametrize("masked", [True, False])
def test_saved_policy_applies_info_mask_when_trained_with_masks(masked):
    env = make_env(NamedChoices, action_mask=masked)
    policy = SavedPolicy(Evaluator(env, make_actor(env, (8,))), ExplorationType.RANDOM)
    one = NamedChoices()
    observation, info = one.reset()
    chosen = {tuple(policy(observation, info).tolist()) for _ in range(20)}
    assert (chosen == {(1, 2)}) == masked
    observation, info = policy.make_env().reset()  # which has the mask in its observation
    assert policy(observation, info) in one.action_space


def test_saved_policy_samples_latents_when_actions_are_greedy(tmp_path):
    trainer = build(recipes.dreamerv3, tmp_path, env=EnvConfig("Pendulum-v1", 1), replay_ratio=0)
    trainer.run()
    policy = SavedRun(trainer.folder).policy()

    def actions() -> list[float]:
        policy.reset()
        return [float(policy(np.float32([1.0, 0.0, 0.1])).item()) for _ in range(3)]

    torch.manual_seed(1)
    first, second = actions(), actions()
    torch.manual_seed(1)
    assert actions() == first != second


@pytest.mark.parametrize("observation", [np.zeros((4, 1)), None])
def test_saved_policy_rejects_mismatched_observation(run, observation):
    with raises_setting("observation"):
        SavedRun(run).policy()(observation)


def test_saved_run_loads_when_env_has_step_timeout(tmp_path):
    config = recipes.ppo.Config(
        env=EnvConfig(num_envs=2, vectorization="async", step_timeout=60.0),
        steps=OnPolicySteps(total_policy_steps=64, steps_per_env=8, minibatch_size=16),
        hidden_sizes=[8], log_dir=str(tmp_path), progress=False,
    )  # fmt: skip
    trainer = recipes.ppo.build(config)
    trainer.run()
    assert SavedRun(trainer.folder).policy_steps == 64
