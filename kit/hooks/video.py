"""Episodes as videos."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym

from kit.envs.errors import EnvError
from kit.hooks.base import HookedTrainer, KitHook
from kit.hooks.evaluation import Evaluator
from kit.logging.files import as_folder, make_folder, write_whole
from kit.logging.loggers import RowLogger
from kit.steps import SettingError
from kit.steps.every import Every


class RecordVideo(KitHook):
    """Draws an episode after an evaluation and gives it to the loggers: W&B shows it.

    The episode is one more than those of the evaluation, with actions as there, in an environment
    of its own; of several particles the first acts. Needs the extra ``video``.

    Args:
        folder: where the videos are written, each named by the steps after which it was recorded.
        every: policy steps (offline: gradient steps) between videos: the next evaluation is
            recorded, and that at the end of the plan.
    """

    operations: ClassVar = {"log_row": "record"}

    def __init__(self, folder: Path | str, every: int) -> None:
        self.folder = as_folder(folder)
        self._due = Every(every)

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Draw a first picture, so that a run that cannot be recorded does not begin.

        Raises:
            SettingError: if nothing is evaluated, or the environment cannot be drawn.
        """
        super().register(trainer, name)
        if not isinstance(trainer.evaluate, Evaluator):
            why = "records evaluations, and the trainer makes none"
            raise SettingError("video_every", self._due.period, why, "give it evaluate=Evaluator()")
        with drawn(trainer.evaluate, None) as evaluator:
            evaluator.env.start()

    def record(self, row: dict[str, Any]) -> None:
        """Record an episode if the row is of an evaluation that is due."""
        if "evaluation/return" not in row:
            return
        trainer = self.trainer
        steps = int(row[trainer.plan.axis])
        if not (self._due(steps) or trainer.schedule.done):
            return
        began, video = time.perf_counter(), self.folder / f"{steps}.mp4"
        record_episode(trainer.evaluate, video, trainer.ledger.evaluations)
        for logger in trainer.journal.loggers:
            if isinstance(logger, RowLogger):
                logger.log_video("evaluation/video", video, row)
        trainer.journal.spent("video", began)

    def state_dict(self) -> dict[str, Any]:
        """The steps of the last evaluation that was looked at."""
        return self._due.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        self._due.load_state_dict(state_dict)


def record_episode(
    evaluator: Evaluator, video: Path, number: int = 0, *, seed: int | None = None
) -> dict[str, float]:
    """Play one episode and write it to an MP4 file.

    Args:
        evaluator: whose policy plays, in an environment of its own.
        video: file to write.
        number: of the evaluation, part of the seed.
        seed: of the environment; ``None``: that of the evaluator.

    Returns:
        The metrics of the episode.

    Raises:
        SettingError: if the environment cannot be drawn or a package is missing.
        WriteError: if the file cannot be written.
    """
    with drawn(evaluator, video, seed) as one:
        metrics: dict[str, float] = one(number)
    return metrics


@contextlib.contextmanager
def drawn(evaluator: Evaluator, video: Path | None, seed: int | None = None) -> Iterator[Evaluator]:
    """An evaluator of one episode, which Gymnasium draws, to the file ``video`` if one is given."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a screen
    with tempfile.TemporaryDirectory() as frames, warnings.catch_warnings():
        # Environments that are only looked at write there as well, before it.
        warnings.filterwarnings("ignore", ".*(Overwriting existing|Ignored saving a) video")

        def recorded(env: Any) -> Any:
            first = {"episode_trigger": lambda episode: episode == 0, "disable_logger": True}
            return gym.wrappers.RecordVideo(env, frames, **first)

        own = getattr(evaluator.env.make_again, "keywords", {}).get("wrappers", ())
        one_env = {"num_envs": 1, "wrappers": [*own, recorded], "render_mode": "rgb_array"}
        in_this_process = {"vectorization": "sync", "num_workers": None, "step_timeout": None}
        seed = evaluator.seed if seed is None else seed
        try:
            one = evaluator.again(episodes=1, seed=seed, **one_env, **in_this_process)
            with contextlib.closing(one):
                yield one
        except (EnvError, SettingError) as error:
            if (refused := _not_drawn(evaluator.env.name, error)) is None:
                raise
            raise refused from None
        if video is not None:
            make_folder(video.parent)
            write_whole(video, next(Path(frames).glob("*.mp4")).read_bytes())


def _not_drawn(name: str, raised: Exception) -> SettingError | None:
    """What drawing needs where this was raised, if it is known."""
    error: BaseException | None = raised
    while not (error is None or isinstance(error, gym.error.DependencyNotInstalled)):
        error = error.__context__
    if error is not None:
        why = f"needs a package that is missing ({error})"
        works = "pip install 'torchrl-kit[video]'"
    elif "OpenGL" in str(raised):
        why, works = f"cannot be drawn: {raised}", "without a screen: MUJOCO_GL=egl or osmesa"
    else:
        return None
    return SettingError("video", name, why, works)
