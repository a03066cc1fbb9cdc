"""Hook that records episodes as videos."""

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
    """Records an episode after an evaluation and passes the video to loggers such as W&B.

    The recorded episode is played in a separate environment, in addition to the evaluation's
    episodes. With several particles, the first particle selects the actions. Requires the ``video``
    extra.

    Args:
        folder: folder for the videos, each named after its step count.
        every: policy steps (gradient steps for offline runs) between videos. The first evaluation
            after each interval and the evaluation at the end of the run are recorded.
    """

    operations: ClassVar = {"log_row": "record"}

    def __init__(self, folder: Path | str, every: int) -> None:
        self.folder = as_folder(folder)
        self._due = Every(every)

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register the hook and render one frame to detect missing rendering support early.

        Raises:
            SettingError: if the trainer has no evaluator, or the environment cannot be rendered.
        """
        super().register(trainer, name)
        if not isinstance(trainer.evaluate, Evaluator):
            reason = "needs an evaluator, but the trainer has none"
            raise SettingError("video_every", self._due.period, reason, "pass evaluate=Evaluator()")
        with drawn(trainer.evaluate, None) as evaluator:
            evaluator.env.start()

    def record(self, row: dict[str, Any]) -> None:
        """Record an episode if the row contains an evaluation and a video is due."""
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
        """Return the step count at which the hook last checked whether a video is due."""
        return self._due.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._due.load_state_dict(state_dict)


def record_episode(
    evaluator: Evaluator, video: Path, number: int = 0, *, seed: int | None = None
) -> dict[str, float]:
    """Play one episode and write it to an MP4 file.

    Args:
        evaluator: evaluator whose policy plays the episode in a separate environment.
        video: file to write.
        number: index of the evaluation, on which the environment's seed depends.
        seed: base seed for the environment; defaults to the evaluator's seed.

    Returns:
        Metrics for the episode.

    Raises:
        SettingError: if the environment cannot be rendered or a package is missing.
        WriteError: if the file cannot be written.
    """
    with drawn(evaluator, video, seed) as recorder:
        metrics: dict[str, float] = recorder(number)
    return metrics


@contextlib.contextmanager
def drawn(evaluator: Evaluator, video: Path | None, seed: int | None = None) -> Iterator[Evaluator]:
    """Create an evaluator that plays one episode and records it to the file ``video``, if given."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # lets pygame render without a display
    with tempfile.TemporaryDirectory() as frames, warnings.catch_warnings():
        # The rendering test and the recording both write a video to this folder.
        warnings.filterwarnings("ignore", ".*(Overwriting existing|Ignored saving a) video")

        def recorded(env: Any) -> Any:
            first = {"episode_trigger": lambda episode: episode == 0, "disable_logger": True}
            return gym.wrappers.RecordVideo(env, frames, **first)

        wrappers = getattr(evaluator.env.make_again, "keywords", {}).get("wrappers", ())
        one_env = {"num_envs": 1, "wrappers": [*wrappers, recorded], "render_mode": "rgb_array"}
        in_this_process = {"vectorization": "sync", "num_workers": None, "step_timeout": None}
        seed = evaluator.seed if seed is None else seed
        try:
            recorder = evaluator.again(episodes=1, seed=seed, **one_env, **in_this_process)
            with contextlib.closing(recorder):
                yield recorder
        except (EnvError, SettingError) as error:
            if (setting_error := _rendering_error(evaluator.env.name, error)) is None:
                raise
            raise setting_error from None
        if video is not None:
            make_folder(video.parent)
            write_whole(video, next(Path(frames).glob("*.mp4")).read_bytes())


def _rendering_error(name: str, raised: Exception) -> SettingError | None:
    """Return an error that explains how to fix a known rendering problem, or ``None``."""
    error: BaseException | None = raised
    while not (error is None or isinstance(error, gym.error.DependencyNotInstalled)):
        error = error.__context__
    if error is not None:
        reason = f"needs a package that is not installed ({error})"
        hint = "Run pip install 'torchrl-kit[video]'"
    elif "OpenGL" in str(raised):
        reason = f"cannot be rendered: {raised}"
        hint = "on a machine without a display, set MUJOCO_GL=egl or MUJOCO_GL=osmesa"
    else:
        return None
    return SettingError("video", name, reason, hint)
