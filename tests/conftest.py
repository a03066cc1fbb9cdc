"""What all tests share."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch
import torchrl.modules  # noqa: F401  # switches validation of distributions off when imported

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
