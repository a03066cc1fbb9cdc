"""Actor-critic losses that run a shared backbone once per gradient step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictSequential
from torch import nn

from kit.config.loss import has_target_networks


def with_shared_backbone(
    make: Callable[..., Any], networks: tuple[Any, ...], **arguments: Any
) -> Any:
    """Create a loss that runs a backbone shared by actor and critic once per minibatch.

    Losses with target networks run the backbone themselves, because targets need a separate copy.
    """
    body = _body_of(networks)
    if body is None:
        return make(*networks, **arguments)
    actor, critic = networks
    _, *head = actor.module[0]
    _, *value = critic
    heads = ProbabilisticTensorDictSequential(*head, *list(actor.module)[1:])
    loss = make(heads, TensorDictSequential(*value), **arguments)
    return make(*networks, **arguments) if has_target_networks(loss) else SharedBackbone(loss, body)


def _body_of(networks: tuple[Any, ...]) -> Any:
    """Return the backbone that actor and critic share, or ``None`` if there is none."""
    if len(networks) != 2 or not isinstance(networks[1], TensorDictSequential):
        return None
    first = getattr(networks[0], "module", [None])[0]
    if not isinstance(first, TensorDictSequential) or first[0] is not networks[1][0]:
        return None
    return first[0] if "features" in first[0].out_keys else None


class SharedBackbone(nn.Module):
    """Wraps a loss so that a shared backbone runs once per minibatch.

    TorchRL's losses run actor and critic separately, so a shared backbone would run twice. The
    first ``burn_in`` steps of sequences only warm up a recurrent backbone's hidden state and are
    not passed to the loss. Sequences are flattened, because TorchRL's losses would otherwise report
    explained variance and effective sample size per time step.

    Args:
        loss: a loss module whose networks read ``features`` and other backbone outputs.
        body: backbone that writes ``features``.
    """

    def __init__(self, loss: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the losses for a minibatch of shape ``[rows]`` or ``[sequences, steps]``."""
        inputs = minibatch.select(*self.body.in_keys, strict=False)  # type: ignore[misc]
        outputs = self.body(inputs).exclude("next").select(*self.body.out_keys, strict=False)  # type: ignore[misc]
        minibatch = minibatch.copy().update(outputs)
        burn_in = getattr(self.body, "burn_in", 0)
        rows = minibatch[:, burn_in:] if burn_in else minibatch
        return self.loss(rows.reshape(-1))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """Return coefficients and other attributes of the wrapped loss."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "loss":
                raise
            return getattr(super().__getattr__("loss"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set coefficients and other attributes on the wrapped loss."""
        loss = vars(self)["_modules"].get("loss")
        is_local = name in vars(self) or hasattr(type(self), name) or not hasattr(loss, name)
        super().__setattr__(name, value) if is_local else setattr(loss, name, value)
