"""Hydra launcher that executes each run of a sweep as a Ray task."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

from kit.distributed.ray_session import ray_session

_TARGET = "hydra_plugins.kit.RayLauncher"
"""Name of the class in Hydra's config. Hydra requires the prefix, but does not import the name."""
_RETRIES = 3
_SECONDS_TO_SAVE = 20


class RayLauncher(Launcher):
    """Executes runs as Ray tasks. A task whose worker process or node dies is executed again.

    Args:
        num_cpus: CPUs that Ray reserves for each run.
        num_gpus: GPUs that Ray reserves for each run; fractions share a GPU.
    """

    def __init__(self, num_cpus: float, num_gpus: float) -> None:
        self.resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Store Hydra's objects and the job, a :class:`~kit.cli.sweep.Job`."""
        self.context, self.job, self.config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Execute all runs and return their results."""
        setup_globals()
        with ray_session("hydra/launcher", "ray"):
            import ray

            task = ray.remote(max_retries=_RETRIES, **self.resources)(_execute)
            shared = ray.put((self.context, self.config, self.job, Singleton.get_state()))
            here = os.getcwd()
            runs = list(enumerate(map(list, job_overrides), initial_job_idx))
            refs = [task.remote(here, number, words, shared) for number, words in runs]
            with _cancelled_at_exit(refs):
                return [self._result(ref, *run) for ref, run in zip(refs, runs)]

    def _result(self, ref: Any, number: int, overrides: list[str]) -> JobReturn:
        """Return a run's result. If Ray gave up on the run, record the error for the table."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            failed = getattr(error, "cause", None) or error
            self.job.record(number, overrides, None, failed)
            result = JobReturn(overrides=overrides, status=JobStatus.FAILED)
            result.return_value = failed
            return result


@contextlib.contextmanager
def _cancelled_at_exit(refs: Sequence[Any]) -> Iterator[None]:
    """Stop all runs if the context is left through Ctrl-C or SIGTERM; they save checkpoints."""
    import ray

    terminated = False

    def terminate(*_: Any) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt  # ray.get() would replace the exit code of SystemExit

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if is_main else None
    try:
        yield
    except BaseException:
        for ref in refs:
            ray.cancel(ref)
        ray.wait(refs, num_returns=len(refs), timeout=_SECONDS_TO_SAVE)
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _execute(
    folder: str, number: int, overrides: list[str], shared: tuple[Any, Any, Any, Any]
) -> JobReturn:
    """Execute a run in a Ray worker, as Hydra's joblib launcher does in its processes."""
    context, config, job, state = shared
    os.chdir(folder)  # workers of a cluster start in another folder
    setup_globals()
    Singleton.set_state(state)
    run = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(run):
        run.hydra.job.id, run.hydra.job.num = f"{run.hydra.job.name}_{number}", number
    HydraConfig.instance().set_config(run)
    return run_job(
        hydra_context=context,
        config=run,
        task_function=job,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def register() -> None:
    """Add ``hydra/launcher=ray`` to Hydra, which finds it without a package ``hydra_plugins``."""
    node = {"_target_": _TARGET, "num_cpus": 1, "num_gpus": 0}
    ConfigStore.instance().store(group="hydra/launcher", name="ray", node=node)
    Plugins.instance().class_name_to_class[_TARGET] = RayLauncher
