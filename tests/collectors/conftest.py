"""One Ray for all tests that need it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def local_ray():
    """Start Ray with four CPUs and without its dashboard."""
    ray = pytest.importorskip("ray")
    from kit.collectors.ray import _process_kept

    memory = {"object_store_memory": 100 * 2**20}
    with _process_kept():
        for attempt in range(3):  # Ray gives up after 30 seconds on a loaded machine
            try:
                ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False,
                         logging_level="ERROR", **memory)  # fmt: skip
                break
            except Exception:
                ray.shutdown()
                if attempt == 2:
                    raise
    yield ray
    ray.shutdown()
