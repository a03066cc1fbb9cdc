"""Networks that read observations, and their activations."""

from __future__ import annotations

import pytest
import torch

from kit.modules.networks import ACTIVATIONS, SigmoidTanh


def test_sigmoid_tanh_matches_tanh_up_to_rounding():
    value = torch.linspace(-20, 20, 100_001)
    assert (SigmoidTanh()(value) - value.tanh()).abs().max() < 3e-7


def test_sigmoid_tanh_gradient_matches_tanh():
    value = torch.linspace(-5, 5, 101, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        torch.autograd.grad(SigmoidTanh()(value).sum(), value),
        torch.autograd.grad(value.tanh().sum(), value),
    )


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_keep_shapes_and_zero(name):
    assert torch.equal(ACTIVATIONS[name]()(torch.zeros(3, 2)), torch.zeros(3, 2))
