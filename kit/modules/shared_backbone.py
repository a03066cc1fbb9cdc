"""A loss of actor and critic with a shared body, run once per gradient step."""

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
    """Make a loss; where actor and critic begin with the same body, it runs once for both.

    Losses with target networks run it by themselves: targets need a body of their own.
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
    """The first module of actor and critic, if it is one and writes ``features``."""
    if len(networks) != 2 or not isinstance(networks[1], TensorDictSequential):
        return None
    first = getattr(networks[0], "module", [None])[0]
    if not isinstance(first, TensorDictSequential) or first[0] is not networks[1][0]:
        return None
    return first[0] if "features" in first[0].out_keys else None


class SharedBackbone(nn.Module):
    """A loss of two heads on what one body writes.

    TorchRL's losses run actor and critic one after the other, so a shared body would run twice. The
    first ``burn_in`` steps of sequences, of a recurrent body that has them, only prepare its hidden
    state: the loss does not see them. It sees steps of sequences as rows: TorchRL's would tell the
    explained variance and the effective sample size of each time step alone.

    Args:
        loss: a loss module whose networks read ``features``, and what else the body writes.
        body: writes ``features``.
    """

    def __init__(self, loss: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the losses of a minibatch ``[rows]`` or ``[sequences, steps]``."""
        seen = minibatch.select(*self.body.in_keys, strict=False)  # type: ignore[misc]
        written = self.body(seen).exclude("next").select(*self.body.out_keys, strict=False)  # type: ignore[misc]
        minibatch = minibatch.copy().update(written)
        burn_in = getattr(self.body, "burn_in", 0)
        rows = minibatch[:, burn_in:] if burn_in else minibatch
        return self.loss(rows.reshape(-1))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """Coefficients and other attributes of the loss."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "loss":
                raise
            return getattr(super().__getattr__("loss"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set coefficients and other attributes of the loss there."""
        loss = vars(self)["_modules"].get("loss")
        own = name in vars(self) or hasattr(type(self), name) or not hasattr(loss, name)
        super().__setattr__(name, value) if own else setattr(loss, name, value)
