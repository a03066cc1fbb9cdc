"""Replaceable parts of a recipe: losses, networks and optimizers."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer
from torchrl import objectives
from torchrl.objectives import LossModule

from kit.config.checks import reject_unused
from kit.config.settings import RunConfig
from kit.lazy import module_and_name
from kit.steps.errors import SettingError, nearest_first

RATES = (
    "learning_rate", "model_learning_rate", "backbone_lr_scale", "critic_backbone_lr_scale",
)  # fmt: skip
"""Settings that change the learning rates of a recipe's optimizer."""
OPTIMIZER = ("optimizer", "beta_1", "max_grad_ratio", "warmup_gradient_steps")
"""Settings that change other arguments of a recipe's optimizer."""


def resolve(name: str | Any) -> Any:
    """Import a loss class or function by name.

    Args:
        name: name in ``torchrl.objectives`` (``ClipPPOLoss``) or full name (``my_module:MyLoss``).
            A class or function is returned unchanged.
    """
    if not isinstance(name, str):
        return name
    module, attribute = module_and_name(name)
    return getattr(importlib.import_module(module or "torchrl.objectives"), attribute)


def name_of(make: Callable[..., Any]) -> str:
    """Return the name of a class or function for use in messages."""
    return str(getattr(make, "__name__", type(make).__name__))


def accepts(make: Callable[..., Any], argument: str) -> bool:
    """Return whether a function or class accepts an argument, directly or via ``**kwargs``."""
    bases: list[Any] = [make]
    constructors: list[Any] = [make]
    if isinstance(make, type):
        ends = (LossModule, nn.Module, object)  # these base classes accept no loss arguments
        classes = itertools.takewhile(lambda base: base not in ends, make.__mro__)
        bases = [base for base in classes if "__init__" in vars(base)]
        constructors = [vars(base)["__init__"] for base in bases]
    for constructor in constructors:
        parameters = inspect.signature(constructor).parameters
        if argument in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    # All constructors pass **kwargs to the next one. A TorchRL loss at the end rejects them.
    return bool(constructors) and bases[-1] not in vars(objectives).values()


class Replacements:
    """A recipe's networks and optimizers, which the caller of ``build`` may replace.

    Args:
        parts: the caller's parts by name: ``make_actor``, ``make_critic``, ``optimizer`` and
            trainer parts.

    Attributes:
        parts: the caller's parts by name.
        requested: names of the replaceable parts that the recipe has requested.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts
        self.requested: set[str] = set()
        self._replaced: dict[str, str] = {}  # setting -> replaced part that read it
        self._used = {"env", "device"}  # env and device always have an effect

    @property
    def without_effect(self) -> dict[str, str]:
        """Caller's parts, keyed by the settings that have no effect because of them."""
        return {name: part for name, part in self._replaced.items() if name not in self._used}

    def network(self, part: str, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Create a network with the caller's factory, or with the recipe's if there is none."""
        self.requested.add(part)
        names = _names_of(make, *arguments, **settings)
        names |= {f"critic_{name}" for name in names if part == "make_critic"}
        if part not in self.parts:
            self._used |= names
            return make(*arguments, **settings)
        self._replaced |= dict.fromkeys(names, part)
        return self.parts[part](arguments[0])

    def pair(self, make: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, Any]:
        """Create the actor and the critic, using the caller's factories where available.

        Raises:
            SettingError: if the caller replaces only one of two networks that share layers.
        """
        factories = ("make_actor", "make_critic")
        self.requested.update(factories)
        replaced = [part for part in factories if part in self.parts]
        names = _names_of(make, *arguments, **settings)
        if len(replaced) == 2:
            self._replaced |= dict.fromkeys(names, "make_actor")
            return self.parts["make_actor"](arguments[0]), self.parts["make_critic"](arguments[0])
        actor, critic = make(*arguments, **settings)
        if not replaced:
            self._used |= names
            return actor, critic
        if settings.get("shared_backbone"):
            reason = f"Actor and critic share layers, but {replaced[0]} replaces only one of them"
            advice = "Pass both make_actor and make_critic, or use shared_backbone=false"
            raise SettingError("shared_backbone", True, reason, advice)
        only = {"make_actor": {"initial_log_std"}, "make_critic": {"critic_hidden_sizes"}}
        self._replaced |= dict.fromkeys(only[replaced[0]], replaced[0])
        self._used |= names - only[replaced[0]]
        network = self.parts[replaced[0]](arguments[0])
        return (network, critic) if replaced == ["make_actor"] else (actor, network)

    def optimizer(
        self, make: type[Optimizer], parameters: Iterable[Any], **settings: Any
    ) -> Optimizer:
        """Create an optimizer with the caller's factory, or with the recipe's if there is none.

        Raises:
            SettingError: if the caller's optimizer lacks some of the parameters.
        """
        custom, groups = self.parts.get("optimizer"), list(parameters)
        if "update" in self.parts:  # the caller's update has its own optimizers
            return make(groups, **settings)
        self.requested.add("optimizer")
        if custom is None:
            return make(groups, **settings)
        if isinstance(custom, str):
            custom = getattr(optim, custom)
        rates: dict[str, Any] = {k: v for k, v in settings.items() if k in ("lr", "fused")}
        self._replaced |= dict.fromkeys(OPTIMIZER, "optimizer")
        if isinstance(custom, type) and issubclass(custom, Optimizer) and custom is not Optimizer:
            return custom(groups, **{k: v for k, v in rates.items() if accepts(custom, k)})
        self._replaced |= dict.fromkeys(RATES, "optimizer")
        flat = [
            p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])
        ]
        optimizer: Optimizer = custom(flat) if callable(custom) else custom
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if missing := sum(id(p) not in trained for p in flat):
            reason = f"The optimizer lacks {missing} of the {len(flat)} parameters"
            advice = "Pass a class, a name in torch.optim, or a function that takes the parameters"
            raise SettingError("optimizer", type(optimizer).__name__, reason, advice)
        return optimizer


def _names_of(make: Callable[..., Any], *arguments: Any, **settings: Any) -> set[str]:
    """Return the names of the arguments passed to a function, including its ``**kwargs``."""
    signature = inspect.signature(make)
    bound = signature.bind(*arguments, **settings).arguments
    kwargs = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    return {*bound.keys() - kwargs}.union(*(bound[name] for name in kwargs if name in bound))


REPLACED = ("make_actor", "make_critic", "optimizer")
"""Parts that replace a recipe's networks and optimizers."""
PARTS = (
    "collector", "update", "buffer", "advantage", "evaluate", "exploration_policy", "hooks",
    "logger", "loss_module", *REPLACED,
)  # fmt: skip
"""Parts that the caller of a recipe's ``build`` may pass."""


def check_parts(parts: Mapping[str, Any]) -> None:
    """Raise SettingError for parts that cannot be replaced."""
    for name, part in parts.items():
        if name not in PARTS:
            advice: Any = nearest_first(name, PARTS)[:3]
            advice = "Use make_loss=..., or Config(loss=...)" if name == "loss" else advice
            raise SettingError(name, part, "A trainer has no such part", advice)


def check_replaced(cfg: RunConfig, replacements: Replacements, algorithm: str) -> None:
    """Reject unused parts, and settings that have no effect because of replaced parts."""
    requested, parts = {*replacements.requested}, replacements.parts
    update = parts.get("update", ...)
    if update is not ... and not hasattr(update, "optimizers"):
        requested |= {"loss_module", "optimizer"}  # TorchRL's updates read these from the trainer
    for name in ("loss_module", *REPLACED):
        if name in parts and name not in requested:
            advice: Any = [n for n in REPLACED if n in requested and n not in parts]
            advice = "Pass make_loss=... instead" if name == "loss_module" else advice
            with_update = " with a custom update" if update is not ... else ""
            reason = f"The {algorithm} recipe does not use this part{with_update}"
            raise SettingError(name, name_of(parts[name]), reason, advice)
    for name, part in replacements.without_effect.items():
        if hasattr(cfg, name):
            reject_unused(cfg, (name,), f"{part} replaces the part that uses this setting")


def check_update(cfg: RunConfig, update: Any) -> None:
    """Reject ``compile`` or ``precision`` if the recipe's update or loss ignores the setting."""
    compiles, loss = getattr(update, "compile", cfg.compile), getattr(update, "loss_module", None)
    if cfg.compile != "auto" and compiles != cfg.compile:
        reason = f"The recipe created its update with compile={compiles}"
        raise SettingError("compile", cfg.compile, reason, "Use Update(..., compile=cfg.compile)")
    if cfg.precision != "float32" and loss is not None and "forward" not in vars(loss):
        reason = f"The recipe's loss {type(loss).__name__} ignores this setting"
        advice = "Create the loss with experiment.make_loss(...)"
        raise SettingError("precision", cfg.precision, reason, advice)
