"""What a run needs of the memory is compared with what there is before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import kit.config.checks
import kit.config.memory
import recipes.dqn
import recipes.dreamerv3
import recipes.ppo
import recipes.ppo_recurrent
import recipes.sac
import recipes.tqc
from kit.config.memory import MemoryEstimate, check_memory, memory_of_machine
from kit.experiment import EnvConfig
from kit.steps import SettingError
from kit.steps.settings import OnPolicySteps
from tests.errors import raises_setting

MIB = 2**20


@pytest.fixture
def machine(monkeypatch) -> Iterator[Any]:
    """Sets the bytes that the machine has."""

    def has(size: int) -> None:
        found = size, "memory of this machine"
        monkeypatch.setattr(kit.config.checks, "memory_of_machine", lambda: found)

    return has


def refused(recipe: Any, **settings: Any) -> SettingError:
    with pytest.raises(SettingError) as raised:
        recipe.build(recipe.Config(log_dir=None, **settings)).shutdown()
    assert "\n" not in str(raised.value)
    return raised.value


# Pendulum: 3 observations in float32, twice; an action, a reward; three flags, two integers.
ROW = 2 * 12 + 4 + 4 + 3 + 16


def test_build_rejects_oversized_buffer_and_suggests_largest(machine):
    machine(100 * MIB)
    error = refused(recipes.sac, buffer_size=10 * MIB)
    assert str(error).startswith(
        f"buffer_size={10 * MIB}: It needs {10 * ROW / 1024:.1f} GiB, and the run may use at most "
    )
    largest = int(str(error).split("Use at most ")[1].rstrip("."))
    assert 0.95 * 100 * MIB < largest * ROW < 100 * MIB
    recipes.sac.build(recipes.sac.Config(log_dir=None, buffer_size=largest)).shutdown()
    assert refused(recipes.sac, buffer_size=largest + 1).field == "buffer_size"


def test_buffer_on_disk_needs_disk_space_instead_of_ram(machine, tmp_path, monkeypatch):
    machine(100 * MIB)
    on_disk = {"buffer_folder": str(tmp_path)}
    recipes.sac.build(recipes.sac.Config(log_dir=None, buffer_size=10 * MIB, **on_disk)).shutdown()
    free = SimpleNamespace(free=100 * MIB)
    monkeypatch.setattr(kit.config.memory.shutil, "disk_usage", lambda folder: free)
    error = refused(recipes.sac, buffer_size=10 * MIB, **on_disk)
    assert f"0.1 GiB, the free space in {tmp_path}" in str(error)


def test_memory_estimate_includes_stored_latents(machine):
    machine(100 * MIB)
    without = {"stored_latents": False, "buffer_size": MIB}
    recipes.dreamerv3.build(recipes.dreamerv3.Config(log_dir=None, **without)).shutdown()
    recipes.dreamerv3.build(recipes.dreamerv3.Config(log_dir=None, buffer_size=400_000)).shutdown()
    assert refused(recipes.dreamerv3, buffer_size=400_000, latents=64).field == "buffer_size"
    assert refused(recipes.dreamerv3, buffer_size=MIB).field == "buffer_size"


def test_build_rejects_oversized_batch(machine):
    machine(100 * MIB)
    steps = OnPolicySteps(total_policy_steps=8 * 10**6, steps_per_env=10**6)
    assert refused(recipes.ppo, steps=steps).field == "steps.steps_per_env"
    steps = OnPolicySteps(total_policy_steps=10**6, steps_per_env=None, min_steps=10**6)
    assert refused(recipes.ppo, steps=steps).field == "steps.min_steps"
    env = EnvConfig(vectorization="tensor", num_envs=10**6)
    steps = OnPolicySteps(total_policy_steps=8 * 10**6, steps_per_env=8)
    assert refused(recipes.ppo, env=env, steps=steps).field == "env.num_envs"


def test_check_memory_names_setting_with_largest_estimate():
    needs = [MemoryEstimate("big", 10, 11), MemoryEstimate("small", 1, 50)]
    with raises_setting("big"):
        check_memory(needs, 60, "memory of this machine")
    check_memory(needs, 160, "memory of this machine")


def test_memory_of_machine_returns_size():
    size, words = memory_of_machine()
    assert size > 100 * MIB
    assert "memory" in words


def test_memory_of_machine_respects_container_limit(monkeypatch):
    monkeypatch.setattr("kit.config.memory._control_groups", lambda: iter(["max", str(5 * MIB)]))
    assert memory_of_machine() == (5 * MIB, "memory that this process may use")
