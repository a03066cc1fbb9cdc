"""What all tests share."""

from __future__ import annotations

import os
import resource
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch
import torchrl.modules  # noqa: F401  # switches validation of distributions off when imported

from tests import tiers

# Processes that tests start import this tree too, `recipes` included, from whatever folder.
_ROOT, _BEFORE = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{_BEFORE}" if _BEFORE else _ROOT

# No example is wrong because a machine was busy.
busy = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("kit", deadline=None, suppress_health_check=busy)
hypothesis.settings.load_profile("kit")


@pytest.fixture(autouse=True)
def _one_thread_and_no_leaks():
    """Every test runs on one thread, from seed 0, and leaves global settings as they were."""
    threads = torch.get_num_threads()
    checked = torch.distributions.Distribution._validate_args
    default = torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(default)
    assert torch.distributions.Distribution._validate_args == checked
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


@pytest.fixture
def axes(monkeypatch):
    """Keeps the axes that are drawn, to look at them."""
    from matplotlib.figure import Figure

    kept, subplots = [], Figure.subplots

    def keep(*args, **kwargs):
        kept.append(subplots(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(Figure, "subplots", keep)
    return kept


# ---------------------------------------------------------------------- tiers
def pytest_addoption(parser):
    parser.addoption("--durations-file", action="store_true", help="write tests/durations.json")


def pytest_configure(config):
    if config.getoption("--durations-file") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests as slow by their recorded durations."""
    durations, unknown = tiers.read(), []
    for item in items:
        seconds = tiers.seconds(item.nodeid, durations)
        if any(map(item.get_closest_marker, ("guard", "nightly", "gpu"))):
            continue
        if seconds is None:
            unknown.append(item.nodeid)
        elif seconds > tiers.LIMIT:
            item.add_marker("slow")
    if unknown and "CI" in os.environ and not config.getoption("--durations-file"):
        tests = "\n  ".join(unknown[:20])
        raise pytest.UsageError(tiers.ADVICE.format(tests=tests, limit=tiers.LIMIT))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    item.cpu_before = _cpu_seconds()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Report the CPU seconds of a test, with those of processes that it started."""
    if call.when == "teardown":
        item.user_properties.append(("cpu", _cpu_seconds() - item.cpu_before))
        if item.get_closest_marker("guard"):
            item.user_properties.append(("guard", True))


class _Recorder:
    """Collects the CPU seconds of all tests and writes them after the session."""

    def __init__(self):
        self.measured, self.guards = {}, set()

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if "cpu" in properties:
            self.measured[report.nodeid] = properties["cpu"]
        if "guard" in properties:
            self.guards.add(report.nodeid)

    def pytest_sessionfinish(self):
        tiers.write(self.measured, self.guards)


def _cpu_seconds():
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
