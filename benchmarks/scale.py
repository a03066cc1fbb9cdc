"""Costs of several processes: ranks of torchrun, and workers of ``collector=ray``.

Run with ``python -m benchmarks scale``. Ray must be installed.

All ratios are medians of ratios within one round, in which the compared cases run one after
another. CPU times are sums over this process and all worker processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import (
    interleaved,
    machine,
    markdown_table,
    median,
    ratio,
    write_results,
)
from benchmarks.scale_learners import learners
from kit.collectors import RayCollector
from kit.collectors.chunk_worker import LocalTransport
from kit.envs import make_env
from kit.modules import make_actor

ID, WORKERS, ENVS = "CartPole-v1", 2, 16
MILLISECONDS = (5, 15, 50, 150)
SECONDS = 1.5
"""How long a case runs in a round, at least."""
_TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    """Start Ray with enough CPUs for all collectors of a measurement."""
    import ray

    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR", object_store_memory=2**29)  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def _collector(steps_per_env: int, *, local: bool = False, **settings: Any) -> RayCollector:
    """Create a collector whose workers run in this process or in Ray."""
    env = make_env(ID, ENVS, seed=0)
    actor = make_actor(env, hidden_sizes=(64, 64))
    settings = {"workers": WORKERS, "steps_per_env": steps_per_env, **settings}
    return RayCollector(env, actor, transport=LocalTransport if local else None, **settings)


def worker_cpu() -> float:
    """Return the CPU seconds of all processes of Ray that execute tasks or actors."""
    total = 0.0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def _cpu(collector: Any) -> Callable[[], float]:
    """Return a case: CPU microseconds per policy step, of this process and all workers."""

    def case() -> float:
        steps, end = 0, time.monotonic() + SECONDS
        began = time.process_time() + worker_cpu()
        while time.monotonic() < end:
            steps += collector.collect().numel()
        return (time.process_time() + worker_cpu() - began) / steps * 1e6

    return case


def _rate(collector: Any) -> Callable[[], float]:
    """Return a case: policy steps per second of wall time."""

    def case() -> float:
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            steps += collector.collect().numel()
        return steps / (time.perf_counter() - began)

    return case


def _steps_for(milliseconds: float) -> int:
    """Return the number of steps per env for which a worker collects this long."""
    collector = _collector(256, local=True)
    figures = interleaved({"local": _cpu(collector)}, 3)["local"]
    collector.shutdown()
    return max(int(milliseconds * 1e3 / median(figures) / (ENVS // WORKERS)), 1)


def overhead(rounds: int) -> str:
    """Return a table of the CPU time of workers, for chunks of different duration."""
    per_millisecond = _steps_for(100) / 100
    rows = []
    for milliseconds in MILLISECONDS:
        steps = max(round(milliseconds * per_millisecond), 1)
        local, remote = _collector(steps, local=True), _collector(steps)
        cases = {"local": _cpu(local), "ray": _cpu(remote)}
        figures = interleaved(cases, rounds)
        rows.append([
            f"{milliseconds} ms", f"{steps * ENVS // WORKERS:,}",
            *[f"{median(figures[name]):.1f}" for name in cases],
            f"{ratio(figures['ray'], figures['local']):.2f}",
        ])  # fmt: skip
        local.shutdown()
        remote.shutdown()
    header = ["chunk", "policy steps", "one process, us/step", "Ray, us/step", "ratio"]
    return markdown_table(header, rows)


def speed_up(rounds: int) -> str:
    """Return a table of wall time with one and two workers, saving of states and memory."""
    steps = _steps_for(50)
    cases = {"one": {"workers": 1}, "two": {}, "never": {"state_every": 0}}
    collectors = {name: _collector(steps, **how) for name, how in cases.items()}
    rates = interleaved({name: _rate(collectors[name]) for name in ("one", "two")}, rounds)
    cpu = interleaved({name: _cpu(collectors[name]) for name in ("two", "never")}, rounds)
    memory = max(usage["peak_memory"] for usage in collectors["two"].usage())
    for collector in collectors.values():
        collector.shutdown()
    rows = [
        ["wall time: two workers / one", f"{ratio(rates['two'], rates['one']):.2f}"],
        ["CPU time: state_every=8 / never", f"{ratio(cpu['two'], cpu['never']):.3f}"],
        ["peak memory of a worker", f"{memory:.0f} MiB"],
    ]
    return markdown_table(["", "value"], rows)


def against_torchrl(rounds: int) -> str:
    """Return a table of CPU time relative to TorchRL's RayCollector with the same batches."""
    from torchrl.collectors.distributed import RayCollector as Rival

    steps = _steps_for(50)
    env = make_env(ID, ENVS // WORKERS, seed=0)
    actor = make_actor(env, hidden_sizes=(64, 64))
    create = env.make_again
    rival = Rival(
        [create] * WORKERS,
        actor,
        frames_per_batch=steps * ENVS,
        total_frames=10**9,
        sync=True,
        remote_configs={"num_cpus": 1, "num_gpus": 0},
    )
    mine = _collector(steps)
    batches = iter(rival)

    class Batches:
        """TorchRL's batches."""

        def collect(self) -> Any:
            """Return the next batch."""
            return next(batches)

    figures = interleaved({"kit": _cpu(mine), "TorchRL": _cpu(Batches())}, rounds)
    mine.shutdown()
    rival.shutdown()
    return markdown_table(
        ["", "us/step"],
        [[name, f"{median(values):.1f}"] for name, values in figures.items()]
        + [["ratio", f"{ratio(figures['TorchRL'], figures['kit']):.1f}"]],
    )


def workers(rounds: int = 5) -> str:
    """Return the section about workers of ``collector=ray``."""
    torch.set_num_threads(1)
    with _ray():
        parts = [overhead(rounds), speed_up(rounds)]
        try:
            parts.append(against_torchrl(rounds))
        except Exception as error:
            parts.append(f"TorchRL's RayCollector failed: {type(error).__name__}: {error}"[:300])
    text = f"{ID}, {ENVS} envs, {WORKERS} workers; load of the machine: {os.getloadavg()[0]:.1f}."
    return "\n\n".join(["## Several collecting processes", text, *parts])


def main(rounds: int = 5) -> Path:
    """Measure and write the results."""
    parts = [f"{machine(1, ['ray'])}; {rounds} rounds.", learners(rounds), workers(rounds)]
    text = "\n\n".join(parts)
    return write_results("scale", "Several processes", text)


if __name__ == "__main__":
    main()
