"""Create a recipe's loss, and check that networks and settings are compatible with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl import objectives

from kit.config.checks import reraise_as_setting_error
from kit.config.parts import accepts, name_of, resolve
from kit.config.settings import RunConfig
from kit.steps import SettingError

_SQUARED_ERROR_LOSSES = (
    objectives.DQNLoss, objectives.DDPGLoss, objectives.TD3Loss, objectives.TD3BCLoss,
    objectives.REDQLoss, objectives.IQLLoss, objectives.CQLLoss, objectives.DiscreteCQLLoss,
)  # fmt: skip
"""TorchRL losses whose ``td_error`` is the squared TD error."""


class RecipeLoss:
    """Loss class or function of a recipe, with checks.

    Args:
        loss: class or function, or a name that :func:`~kit.config.parts.resolve` accepts.
        cfg: recipe settings.

    Attributes:
        make: class or function that creates the loss module.
        module: loss module; set by :meth:`check`.
        is_custom: whether the settings select a loss other than the recipe's default.
    """

    module: nn.Module

    def __init__(self, loss: str | Callable[..., Any], cfg: RunConfig) -> None:
        self.make, self._cfg, self._defaults = resolve(loss), cfg, type(cfg)()
        self._default = getattr(self._defaults, "loss", "the recipe's")
        self._name = str(loss)
        is_setting = isinstance(loss, str) and loss == getattr(cfg, "loss", None)
        self.is_custom = is_setting and loss != self._default

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the loss accepts.

        Raises:
            SettingError: if the loss does not accept a setting that differs from its default, or if
                it cannot omit the value loss when the critic is fitted separately.
        """
        accepted, make = {**arguments}, self.make
        for name in arguments:
            if hasattr(self._defaults, name) and not accepts(make, name):
                self._check_default(name, accepted.pop(name))
        is_a2c = isinstance(make, type) and issubclass(make, objectives.A2CLoss)
        if is_a2c and accepted.get("critic_coeff") == 0:
            # With 0, A2CLoss computes the value loss anyway. In PPO losses, None would mean 1.
            accepted["critic_coeff"] = None
        return accepted

    def _check_default(self, name: str, argument: Any) -> None:
        """Raise SettingError if a setting that the loss does not accept was changed."""
        make, value = self.make, getattr(self._cfg, name)  # the argument may be a converted value
        is_reinforce = isinstance(make, type) and issubclass(make, objectives.ReinforceLoss)
        keeps_critic = is_reinforce and name == "critic_coeff" and not argument
        if keeps_critic or value != getattr(self._defaults, name):
            advice = f"Remove it, or use a loss that accepts it, such as {self._default}"
            reason = f"The loss {name_of(make)} does not accept this setting"
            raise SettingError(name, value, reason, advice)

    @contextlib.contextmanager
    def reraising(self) -> Iterator[None]:
        """Convert exceptions from a custom loss to a SettingError for ``loss``."""
        if not self.is_custom:
            yield
            return
        reason = "The loss is not compatible with this recipe"
        with reraise_as_setting_error("loss", self._name, reason, [self._default]):
            yield

    def check(
        self, module: nn.Module, networks: Sequence[nn.Module], arguments: Mapping[str, Any]
    ) -> None:
        """Check the loss module that was created from networks and arguments.

        Raises:
            SettingError: if the loss lacks target networks that the recipe updates, supports only
                one action, clamps the initial temperature or copies shared weights.
        """
        self.module = module
        if self.is_custom and hasattr(self._defaults, "tau") and not has_target_networks(module):
            reason = "This recipe updates target networks, but the loss has none"
            raise SettingError("loss", self._name, reason, [self._default])
        actions = getattr(networks[0], "dist_sample_keys", ()) if networks else ()
        if len(actions) > 1 and isinstance(module, (objectives.A2CLoss, objectives.ReinforceLoss)):
            reason = f"The loss supports only one action, but the environment has {[*actions]}"
            advice = "Use the ppo recipe and its losses, or an environment with one action array"
            raise SettingError("loss", name_of(self.make), reason, advice)
        _check_temperature(module, arguments.get("alpha_init"))
        self._check_shared_weights(networks)

    def _check_shared_weights(self, networks: Sequence[nn.Module]) -> None:
        """Reject a loss that copies the weights that the critics share with the actor.

        TorchRL's losses with several critics copy shared weights unless ``separate_losses=True``.
        """
        copies = [
            {weight.data_ptr() for weight in part.values(True, True) if not is_lazy(weight)}
            for name, part in self.module.named_children()
            if isinstance(part, TensorDictParams) and not name.startswith("target_")
        ]
        originals = [
            {weight.data_ptr() for weight in network.parameters() if not is_lazy(weight)}
            for network in networks
        ]
        shared = set.intersection(*originals) if len(originals) == len(copies) == 2 else set()
        if any(sum(weight in part for part in copies) == 1 for weight in shared):
            reason = "The loss copies the weights that the critics share with the actor"
            advice = "Pass separate_losses=True, so that only the actor loss trains shared weights"
            hint = "Or use separate networks, or a custom LossModule"
            raise SettingError("make_loss", name_of(self.make), reason, advice, hint)

    @property
    def writes_squares(self) -> bool:
        """Whether the ``td_error`` that the loss writes for priorities is squared."""
        known = isinstance(self.module, _SQUARED_ERROR_LOSSES)
        return bool(getattr(self.module, "writes_squared_errors", known))

    def check_n_step(self, batch: TensorDictBase, n_step: int) -> None:
        """Reject a loss that ignores the number of steps in n-step transitions."""
        steps = torch.full(batch.shape, torch.nan, device=batch.device)
        batch = batch.set("steps_to_next_obs", steps)
        try:
            losses = self.module(batch).items()
        except Exception:  # the loss may reject NaN or the example batch
            return
        found = [value for name, value in losses if str(name).startswith("loss")]
        if found and all(bool(value.isfinite().all()) for value in found):
            name = type(self.module).__name__
            reason = (
                f"The loss {name} does not read steps_to_next_obs, the number of summed rewards"
            )
            advice = (
                "Discount by gamma ** steps_to_next_obs like TorchRL's estimators, or use n_step=1"
            )
            raise SettingError("n_step", n_step, reason, advice)


def has_target_networks(loss: nn.Module) -> bool:
    """Return whether TorchRL's ``SoftUpdate`` would find target networks in a loss."""
    names = [name for name, _ in loss.named_children()]
    return any(name.startswith("target_") and name.endswith("_params") for name in names)


def _check_temperature(loss: nn.Module, initial: float | None) -> None:
    """Reject an initial temperature that TorchRL's loss would clamp."""
    bounds: list[Any] = [getattr(loss, f"{end}_log_alpha", None) for end in ("min", "max")]
    if initial is None or None in bounds:
        return
    low, high = (round(math.exp(bound), 6) for bound in bounds)
    if not low <= initial <= high:
        reason = f"The loss {type(loss).__name__} clamps the temperature to [{low:g}, {high:g}]"
        raise SettingError("initial_alpha", initial, reason, [low if initial < low else high])


@contextlib.contextmanager
def preserve_state(*modules: object) -> Iterator[None]:
    """On exit, restore the RNG state and the modules' buffers, such as running statistics.

    A buffer is restored even if the module has replaced the buffer's tensor.
    """
    restored = [module for module in modules if isinstance(module, nn.Module)]
    values = [(buffer, buffer.clone()) for module in restored for buffer in module.buffers()]
    tensors = [(m._buffers, {**m._buffers}) for module in restored for m in module.modules()]
    with torch.random.fork_rng(), torch.no_grad():
        yield
        for buffers, originals in tensors:
            buffers.update(originals)
        for buffer, value in values:
            buffer.copy_(value)
