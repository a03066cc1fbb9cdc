"""Videos of evaluations: which there are, what they show, who gets them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import pytest
import torch

import recipes.bc
import recipes.ppo
from kit.envs import make_env
from kit.experiment import EnvConfig
from kit.hooks import Evaluator, Hook, RecordVideo
from kit.logging import RowLogger
from kit.steps.settings import OfflineSteps, OnPolicySteps
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.stored import NAMES, read_stored
from tests.tiny import on_policy_plan, ppo_parts, ppo_trainer, weights

pytest.importorskip("pygame")
pytest.importorskip("moviepy")
pytestmark = pytest.mark.filterwarnings("ignore:Importing backend")

LENGTH = 5  # of an episode, policy steps


def ppo(tmp_path: Path, **changes) -> recipes.ppo.Config:
    """Four iterations of 16 policy steps, each followed by an evaluation."""
    settings = {
        "env": EnvConfig(num_envs=2, max_episode_steps=LENGTH),
        "steps": OnPolicySteps(
            total_policy_steps=64, steps_per_env=8, update_epochs=1, minibatch_size=8,
            evaluation_every=16, evaluation_episodes=2,
        ),
        "hidden_sizes": [8], "log_dir": str(tmp_path / "runs"), "progress": False,
    }  # fmt: skip
    return recipes.ppo.Config(**{**settings, **changes})


class Shown(RowLogger):
    """Keeps what it is told to show."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, int]] = []

    def log_video(self, name, file, row):
        assert file.is_file()
        self.told.append((name, file.name, row["policy_steps"]))


def frames_of(video: Path) -> int:
    from moviepy import VideoFileClip

    with VideoFileClip(str(video)) as clip:
        return sum(1 for _ in clip.iter_frames())


def videos_in(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "videos").iterdir())


@pytest.mark.parametrize(
    ("every", "steps"),
    [(16, [16, 32, 48, 64]), (32, [32, 64]), (20, [32, 48, 64]), (40, [48, 64]), (1_000, [64])],
)
def test_video_records_due_and_last_evaluations(every, steps, tmp_path):
    shown = Shown()
    trainer = recipes.ppo.build(ppo(tmp_path, video_every=every), logger=[shown])
    trainer.run()
    assert shown.told == [("evaluation/video", f"{step}.mp4", step) for step in steps]
    assert videos_in(trainer.folder) == [f"{step}.mp4" for step in steps]
    assert frames_of(trainer.folder / "videos" / "64.mp4") == 1 + LENGTH


def test_offline_videos_follow_gradient_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.experiment.read_datasets", read_stored)
    config = recipes.bc.Config(
        env=EnvConfig(id="Pendulum-v1", num_envs=1, max_episode_steps=LENGTH),
        dataset=[NAMES[0]], log_dir=str(tmp_path), progress=False, video_every=20,
        steps=OfflineSteps(
            gradient_steps=40, gradient_steps_per_iteration=10, minibatch_size=8,
            evaluation_every=10, evaluation_episodes=1,
        ),
    )  # fmt: skip
    trainer = recipes.bc.build(config)
    trainer.run()
    assert videos_in(trainer.folder) == ["20.mp4", "40.mp4"]


def test_video_recording_does_not_change_training(tmp_path):
    plain, recorded = (recipes.ppo.build(ppo(tmp_path, video_every=n)) for n in (None, 16))
    plain.run()
    recorded.run()
    without, with_videos = weights(plain), weights(recorded)
    assert all(torch.equal(value, with_videos[name]) for name, value in without.items())
    rows = [(trainer.folder / "metrics.csv").read_bytes() for trainer in (plain, recorded)]
    assert rows[0] == rows[1]


def test_resumed_run_records_same_videos(tmp_path):
    class Stops(Hook):
        operations: ClassVar = {"post_steps": "stop"}

        def stop(self):
            if self.trainer.policy_steps == 48:
                raise OSError("a power cut")

    config = ppo(tmp_path, video_every=32, checkpoint_every=16)
    first = recipes.ppo.build(config, hooks=[Stops()])
    with pytest.raises(RuntimeError, match="a power cut"):
        first.run()
    config.resume, shown = str(first.folder), Shown()
    recipes.ppo.build(config, logger=[shown]).run()
    assert [name for _, name, _ in shown.told] == ["64.mp4"]
    assert videos_in(first.folder) == ["32.mp4", "64.mp4"]


@pytest.mark.parametrize("name", ["64.mp4", "64.mp4.new"])
def test_video_replaces_symlink_across_filesystems(name, tmp_path, monkeypatch):
    rename = os.rename

    def from_another_disk(source, target, **how):
        if Path(source).suffix == ".mp4":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target, **how)

    precious = tmp_path / "precious"
    precious.write_text("precious")
    trainer = recipes.ppo.build(ppo(tmp_path, video_every=1_000))
    videos = trainer.folder / "videos"
    videos.mkdir(exist_ok=True)
    (videos / name).symlink_to(precious)
    monkeypatch.setattr(os, "rename", from_another_disk)
    trainer.run()
    assert precious.read_text() == "precious"
    assert not (videos / "64.mp4").is_symlink()
    assert frames_of(videos / "64.mp4") > 0


def test_video_env_keeps_custom_wrappers(tmp_path):
    made = []

    class Turned(gym.ObservationWrapper):
        def __init__(self, env):
            super().__init__(env)
            made.append(env.render_mode)

        def observation(self, observation):
            return -observation

    plan = on_policy_plan(final_evaluation=True, evaluation_every=16, evaluation_episodes=1)
    parts = ppo_parts(plan)
    env = make_env("CartPole-v1", 1, wrappers=[Turned], max_episode_steps=LENGTH)
    evaluate = Evaluator(env, parts["collector"].policy, episodes=1)
    assert set(made) == {None}
    Trainer(plan, **parts, evaluate=evaluate, hooks=[RecordVideo(tmp_path, every=64)]).run()
    assert "rgb_array" in made
    assert frames_of(tmp_path / "64.mp4") == 1 + LENGTH


# ---------------------------------------------------------------------- refused when it is built
def test_video_requires_run_folder(tmp_path):
    with raises_setting("video_every"):
        recipes.ppo.build(ppo(tmp_path, log_dir=None, video_every=16))


def test_video_requires_evaluation(tmp_path):
    with raises_setting("video_every"):
        ppo_trainer(on_policy_plan(), hooks=[RecordVideo(tmp_path, every=16)])


def test_build_rejects_video_without_render_dependency(tmp_path, monkeypatch):
    from gymnasium.envs.classic_control import CartPoleEnv

    def missing(*_, **__):
        raise gym.error.DependencyNotInstalled("pygame is not installed")

    monkeypatch.setattr(CartPoleEnv, "render", missing)
    with raises_setting("video"):
        recipes.ppo.build(ppo(tmp_path, video_every=16))


def test_build_rejects_video_without_display(tmp_path, monkeypatch):
    from gymnasium.envs.classic_control import CartPoleEnv

    def no_screen(*_, **__):
        raise RuntimeError("an OpenGL platform library has not been loaded into this process")

    monkeypatch.setattr(CartPoleEnv, "render", no_screen)
    with raises_setting("video"):
        recipes.ppo.build(ppo(tmp_path, video_every=16))
