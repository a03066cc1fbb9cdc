"""Losses of which some are not due in a gradient step."""

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
"""The method that returns the critics' loss and its metrics."""

LEFT_OUT = frozenset({"loss_actor", "loss_alpha"})
"""Losses that :func:`losses_due` leaves out."""


def losses_due(loss_module: nn.Module, minibatch: TensorDictBase, due: Set[str]) -> TensorDictBase:
    """What a loss module returns, but for losses of the actor where only the critics' is due.

    Between two steps of a delayed actor (Fujimoto et al. 2018, algorithm 1) its loss is a quarter
    of the arithmetic and no more than a metric. TorchRL's losses compute all they have, but some
    have a method for each part. Any other module, or one that is hooked or changed, returns
    everything.

    Args:
        loss_module: that is minimised.
        minibatch: errors of the critics are written to it, as by the whole loss.
        due: names of the losses whose optimisers step.
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
    """Whether calling it does more than its method: hooks, another ``forward``, a value network.

    Args:
        loss_module: that is called.
        forward: its own in another precision; ``None``: that of its class.
    """
    # One hook is TorchRL's own: it warns of targets that nothing updates.
    hooked = bool(loss_module._forward_hooks) or len(loss_module._forward_pre_hooks) > 1
    with_value = isinstance(loss_module, SACLoss) and loss_module._version == 1
    return hooked or with_value or vars(loss_module).get("forward") is not forward
