"""The loss of a recipe: its arguments, and whether it fits the networks and settings."""

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

from kit.config.checks import reported_as
from kit.config.parts import accepts, name_of, resolve
from kit.config.settings import RunConfig
from kit.steps import SettingError

_OF_SQUARES = (
    objectives.DQNLoss, objectives.DDPGLoss, objectives.TD3Loss, objectives.TD3BCLoss,
    objectives.REDQLoss, objectives.IQLLoss, objectives.CQLLoss, objectives.DiscreteCQLLoss,
)  # fmt: skip
"""Losses of TorchRL whose ``td_error`` is the square of the error."""


class RecipeLoss:
    """The loss class or function of a recipe, with the checks before and after it is called.

    Args:
        given: class or function; or its name, see :func:`~kit.config.parts.resolve`.
        cfg: settings of the recipe.

    Attributes:
        make: the class or function.
        module: the loss module; set by :meth:`check`.
        is_named: whether the settings name another loss than the recipe's.
    """

    module: nn.Module

    def __init__(self, given: str | Callable[..., Any], cfg: RunConfig) -> None:
        self.make, self._cfg, self._defaults = resolve(given), cfg, type(cfg)()
        self._usual = getattr(self._defaults, "loss", "the recipe's")
        self._given = str(given)
        chosen = isinstance(given, str) and given == getattr(cfg, "loss", None)
        self.is_named = chosen and given != self._usual

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments without settings at their default that the loss does not take.

        Raises:
            SettingError: if the loss does not take a setting that was changed, or cannot leave out
                the critic where another part trains it.
        """
        taken, make = {**arguments}, self.make
        for name in arguments:
            if hasattr(self._defaults, name) and not accepts(make, name):
                self._check_default(name, taken.pop(name))
        is_a2c = isinstance(make, type) and issubclass(make, objectives.A2CLoss)
        if is_a2c and taken.get("critic_coeff") == 0:
            taken["critic_coeff"] = None  # it would compute the term; PPO's losses take None for 1
        return taken

    def _check_default(self, name: str, argument: Any) -> None:
        """Refuse to drop an argument that would change the loss."""
        make, value = self.make, getattr(self._cfg, name)  # the argument may be in another unit
        is_reinforce = isinstance(make, type) and issubclass(make, objectives.ReinforceLoss)
        keeps_critic = is_reinforce and name == "critic_coeff" and not argument
        if keeps_critic or value != getattr(self._defaults, name):
            works = f"leave it out, or use a loss that takes it: {self._usual}"
            raise SettingError(name, value, f"is no argument of {name_of(make)}", works)

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Report exceptions of a loss that the settings name as errors of the setting ``loss``."""
        if not self.is_named:
            yield
            return
        with reported_as("loss", self._given, "does not fit this recipe", [self._usual]):
            yield

    def check(
        self, module: nn.Module, networks: Sequence[nn.Module], arguments: Mapping[str, Any]
    ) -> None:
        """Check the loss module that was created from networks and arguments.

        Raises:
            SettingError: if it has no target networks and the recipe updates them, is for one
                action of several, bounds the initial temperature, or copies shared weights.
        """
        self.module = module
        if self.is_named and hasattr(self._defaults, "tau") and not has_target_networks(module):
            why = "has no target networks, which this recipe updates"
            raise SettingError("loss", self._given, why, [self._usual])
        actions = getattr(networks[0], "dist_sample_keys", ()) if networks else ()
        if len(actions) > 1 and isinstance(module, (objectives.A2CLoss, objectives.ReinforceLoss)):
            why = f"is for one action, and the environment has several: {[*actions]}"
            works = "use recipes.ppo and its losses, or an environment with one action array"
            raise SettingError("loss", name_of(self.make), why, works)
        _check_temperature(module, arguments.get("alpha_init"))
        self._check_shared_weights(networks)

    def _check_shared_weights(self, networks: Sequence[nn.Module]) -> None:
        """Refuse a loss that gives critics copies of the weights that they share with the actor.

        TorchRL's losses of several critics do, unless they are told to have separate losses.
        """
        held = [
            {one.data_ptr() for one in part.values(True, True) if not is_lazy(one)}
            for name, part in self.module.named_children()
            if isinstance(part, TensorDictParams) and not name.startswith("target_")
        ]
        given = [
            {one.data_ptr() for one in network.parameters() if not is_lazy(one)}
            for network in networks
        ]
        shared = set.intersection(*given) if len(given) == len(held) == 2 else set()
        if any(sum(one in part for part in held) == 1 for one in shared):
            why = "gives critics copies of the weights that they share with the actor"
            works = "give it separate_losses=True, which trains them by the loss of the actor alone"
            hint = "or take another network for the critics, or a LossModule of your own"
            raise SettingError("make_loss", name_of(self.make), why, works, hint)

    @property
    def writes_squares(self) -> bool:
        """Whether its ``td_error``, from which priorities come, is the square of the error."""
        known = isinstance(self.module, _OF_SQUARES)
        return bool(getattr(self.module, "writes_squared_errors", known))

    def check_n_step(self, batch: TensorDictBase, n_step: int) -> None:
        """Refuse a loss to which it makes no difference how many steps a transition joins."""
        steps = torch.full(batch.shape, torch.nan, device=batch.device)
        batch = batch.set("steps_to_next_obs", steps)
        try:
            losses = self.module(batch).items()
        except Exception:  # it may reject NaN, or this batch
            return
        found = [value for name, value in losses if str(name).startswith("loss")]
        if found and all(bool(value.isfinite().all()) for value in found):
            name = type(self.module).__name__
            why = f"joins steps, and {name} does not read how many: steps_to_next_obs"
            works = "discount by gamma ** steps_to_next_obs, as TorchRL's estimators do, or use 1"
            raise SettingError("n_step", n_step, why, works)


def has_target_networks(loss: nn.Module) -> bool:
    """Return whether a loss has target networks, found as TorchRL's ``SoftUpdate`` finds them."""
    names = [name for name, _ in loss.named_children()]
    return any(name.startswith("target_") and name.endswith("_params") for name in names)


def _check_temperature(loss: nn.Module, initial: float | None) -> None:
    """Refuse an initial temperature outside of the bounds to which a loss of TorchRL clamps it."""
    bounds: list[Any] = [getattr(loss, f"{end}_log_alpha", None) for end in ("min", "max")]
    if initial is None or None in bounds:
        return
    low, high = (round(math.exp(bound), 6) for bound in bounds)
    if not low <= initial <= high:
        why = f"is outside of {low:g} to {high:g}, in which {type(loss).__name__} keeps it"
        raise SettingError("initial_alpha", initial, why, [low if initial < low else high])


@contextlib.contextmanager
def unchanged(*modules: object) -> Iterator[None]:
    """Restore random numbers and the modules' buffers (running moments, say) at the end.

    A module may have replaced a tensor by another one.
    """
    given = [module for module in modules if isinstance(module, nn.Module)]
    before = [(buffer, buffer.clone()) for module in given for buffer in module.buffers()]
    places = [(one._buffers, {**one._buffers}) for module in given for one in module.modules()]
    with torch.random.fork_rng(), torch.no_grad():
        yield
        for buffers, kept in places:
            buffers.update(kept)
        for buffer, value in before:
            buffer.copy_(value)
