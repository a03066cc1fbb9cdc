"""Recipes on a GPU, which is simulated: everything is where it belongs, and little crosses over."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
GUARDS = ("ppo", "sac")
OTHERS = (
    "dqn", "td3", "sac:store_next_observation", "bc", "impala",
    "a2c", "reinforce", "trpo", "svpg", "ppo_recurrent", "rainbow", "ddpg", "sac_discrete", "redq",
    "droq", "tqc", "crossq", "td3_bc", "cql", "iql", "dreamerv1", "dreamerv3", "plan2explore",
)  # fmt: skip

BETWEEN_BATCHES = {
    "kit/collectors/", "torchrl/collectors/", "kit/buffers/", "kit/trainer/batches.py",
    "kit/trainer/torchrl_batches.py",
    "kit/logging/metrics.py", "kit/modules/host_copy.py", "kit/envs/normalize.py",
}  # fmt: skip
"""Where values may cross between host and device, eagerly."""

CHECKS = {
    "host read: torchrl/objectives/ppo.py",  # whether the entropy is finite
    "host read: torchrl/modules/distributions/continuous.py",  # whether there are bounds
    "host read: kit/update/trust_region.py",  # which step of the line search is taken
}
"""What losses ask on the host, where they are not recorded."""


@functools.cache
def runs(names):
    """What each recipe prints, by name."""
    command = [sys.executable, "-m", "tests.simulated_cuda", *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    found = {name: (gradient_steps, crossed) for name, gradient_steps, crossed in lines}
    assert ran.returncode == 0, (sorted(found), ran.stderr[-3_000:])
    return found


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="PyTorch would ask its own CUDA",
)
@pytest.mark.parametrize(
    ("name", "names"),
    [pytest.param(name, GUARDS, marks=pytest.mark.guard) for name in GUARDS]
    + [pytest.param(name, OTHERS, marks=pytest.mark.nightly) for name in OTHERS],
)
def test_recipe_on_simulated_gpu_syncs_only_between_batches(name, names):
    gradient_steps, crossed = runs(names)[name]
    assert gradient_steps > 0
    elsewhere = {one for one in crossed if not any(place in one for place in BETWEEN_BATCHES)}
    assert elsewhere <= CHECKS


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch would ask its own CUDA")
@pytest.mark.parametrize(
    "name",
    [
        "priorities",
        "host",
        "sources",
        "normalized",
        "bytewise",
        "numpy",
        "pieces",
        "states",
        "metrics",
    ],
)
def test_parts_work_together_on_simulated_gpu(name):
    command = [sys.executable, "-m", "tests.parts_on_a_device", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3_000:]
