"""Compute only the losses that are due in a gradient step."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl import objectives
from torchrl.objectives import SACLoss, TD3BCLoss

from kit.losses.crossq import CrossQLoss
from kit.losses.sac import DroQLoss
from kit.losses.td3 import TD3Loss

_CRITICS: dict[type[nn.Module], str] = {
    objectives.TD3Loss: "value_loss",
    TD3Loss: "value_loss",
    TD3BCLoss: "qvalue_loss",
    objectives.CrossQLoss: "qvalue_loss",
    CrossQLoss: "qvalue_loss",
    SACLoss: "qvalue_v2_loss",
    DroQLoss: "qvalue_v2_loss",
}
"""Name of the method that returns the critic loss and metrics, for each loss class."""

LEFT_OUT = frozenset({"loss_actor", "loss_alpha"})
"""Losses that :func:`losses_due` may omit."""


def losses_due(loss_module: nn.Module, minibatch: TensorDictBase, due: Set[str]) -> TensorDictBase:
    """Return a module's losses, omitting actor losses if only the critic loss is due.

    Between two steps of a delayed actor (Fujimoto et al. 2018, algorithm 1), the actor loss is only
    a metric, but takes a quarter of the computation. TorchRL's ``forward`` computes all losses, but
    some modules have a method for each loss. For other modules, and for modules with hooks or a
    replaced ``forward``, all losses are computed.

    Args:
        loss_module: Loss module that is minimised.
        minibatch: Minibatch; TD errors are written to it, as in the module's ``forward``.
        due: Names of the losses whose optimisers take a step.
    """
    method = _CRITICS.get(type(loss_module))
    precision, forward = vars(loss_module).get("autocast_loss", (contextlib.nullcontext(), None))
    if method is None or due != {"loss_qvalue"} or _is_changed(loss_module, forward):
        return loss_module(minibatch)  # type: ignore[no-any-return]
    with precision:
        loss, metrics = getattr(loss_module, method)(minibatch)
    error = metrics.pop("td_error").detach()
    priority = error.max(0)[0] if error.ndim > minibatch.ndim else error
    keys: Any = loss_module.tensor_keys
    minibatch.set(keys.priority, priority)
    return TensorDict(loss_qvalue=loss, **metrics)


def _is_changed(loss_module: nn.Module, forward: Any) -> bool:
    """Return whether the module has hooks, a replaced ``forward`` or a value loss.

    Args:
        loss_module: Loss module.
        forward: The ``forward`` set by :func:`~kit.update.autocast_loss`, or ``None``.
    """
    # TorchRL registers one pre-hook, which warns if target networks are not updated.
    has_hooks = bool(loss_module._forward_hooks) or len(loss_module._forward_pre_hooks) > 1
    has_value = isinstance(loss_module, SACLoss) and loss_module._version == 1
    return has_hooks or has_value or vars(loss_module).get("forward") is not forward
