"""Parts that are given by name or by the caller of a recipe, and the arguments that they take."""

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

RATES = ("learning_rate", "model_learning_rate", "backbone_lr_scale")
"""Settings that act through the learning rates of a recipe's optimizer."""
OPTIMIZER = ("optimizer", "beta_1", "max_grad_ratio", "warmup_gradient_steps")
"""Settings that act through other arguments of a recipe's optimizer."""


def resolve(name: str | Any) -> Any:
    """Import a loss by the name of its class or function.

    Args:
        name: one of TorchRL's losses (``ClipPPOLoss``), a full name (``my_module:MyLoss``), or the
            class itself.
    """
    if not isinstance(name, str):
        return name
    module, attribute = module_and_name(name)
    return getattr(importlib.import_module(module or "torchrl.objectives"), attribute)


def name_of(make: Callable[..., Any]) -> str:
    """Return the name of a class or function for messages."""
    return str(getattr(make, "__name__", type(make).__name__))


def accepts(make: Callable[..., Any], argument: str) -> bool:
    """Whether a function or class takes an argument, through ``**kwargs`` of its bases too."""
    bases: list[Any] = [make]
    constructors: list[Any] = [make]
    if isinstance(make, type):
        ends = (LossModule, nn.Module, object)  # to which nothing is passed on
        own = itertools.takewhile(lambda base: base not in ends, make.__mro__)
        bases = [base for base in own if "__init__" in vars(base)]
        constructors = [vars(base)["__init__"] for base in bases]
    for constructor in constructors:
        parameters = inspect.signature(constructor).parameters
        if argument in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    # The rest is passed to the last one; TorchRL's losses reject it.
    return bool(constructors) and bases[-1] not in vars(objectives).values()


class Replacements:
    """Networks and optimizers that the caller of a recipe's ``build`` replaces.

    Args:
        given: the caller's parts by name: ``make_actor``, ``make_critic``, ``optimizer`` and parts
            of the trainer.

    Attributes:
        asked: names of parts that the recipe can replace.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.asked: set[str] = set()
        self._idle: dict[str, str] = {}
        self._acting = {"env", "device"}  # settings that are also arguments of factories

    @property
    def without_effect(self) -> dict[str, str]:
        """Settings that act through replaced parts alone, with the part of each."""
        return {name: part for name, part in self._idle.items() if name not in self._acting}

    def network(self, part: str, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Create a network: by the caller's factory, or else by the recipe's."""
        self.asked.add(part)
        names = _names_of(make, *arguments, **settings)
        names |= {f"critic_{name}" for name in names if part == "make_critic"}
        if part not in self.given:
            self._acting |= names
            return make(*arguments, **settings)
        self._idle |= dict.fromkeys(names, part)
        return self.given[part](arguments[0])

    def pair(self, make: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, Any]:
        """Create actor and critic by one factory of the recipe, or replace one or both.

        Raises:
            SettingError: if one network is replaced and shares its layers with the other.
        """
        parts = ("make_actor", "make_critic")
        self.asked.update(parts)
        replaced = [part for part in parts if part in self.given]
        names = _names_of(make, *arguments, **settings)
        if len(replaced) == 2:
            self._idle |= dict.fromkeys(names, "make_actor")
            return self.given["make_actor"](arguments[0]), self.given["make_critic"](arguments[0])
        made = make(*arguments, **settings)
        if not replaced:
            self._acting |= names
            return made[0], made[1]
        if settings.get("shared_backbone"):
            why = f"shares layers of actor and critic, and {replaced[0]} replaces one of the two"
            works = "pass both make_actor and make_critic, or set shared_backbone=False"
            raise SettingError("shared_backbone", True, why, works)
        own = {"make_actor": {"initial_log_std"}, "make_critic": {"critic_hidden_sizes"}}
        self._idle |= dict.fromkeys(own[replaced[0]], replaced[0])
        self._acting |= names - own[replaced[0]]
        new = self.given[replaced[0]](arguments[0])
        return (new, made[1]) if replaced == ["make_actor"] else (made[0], new)

    def optimizer(
        self, make: type[Optimizer], parameters: Iterable[Any], **settings: Any
    ) -> Optimizer:
        """Create an optimizer: the caller's, or else the recipe's.

        Raises:
            SettingError: if the optimizer does not hold the parameters.
        """
        given, groups = self.given.get("optimizer"), list(parameters)
        if "update" in self.given:  # the given update has its own optimizers
            return make(groups, **settings)
        self.asked.add("optimizer")
        if given is None:
            return make(groups, **settings)
        if isinstance(given, str):
            given = getattr(optim, given)
        rates: dict[str, Any] = {k: v for k, v in settings.items() if k in ("lr", "fused")}
        self._idle |= dict.fromkeys(OPTIMIZER, "optimizer")
        if isinstance(given, type) and issubclass(given, Optimizer) and given is not Optimizer:
            return given(groups, **{k: v for k, v in rates.items() if accepts(given, k)})
        self._idle |= dict.fromkeys(RATES, "optimizer")
        flat = [one for g in groups for one in (g["params"] if isinstance(g, dict) else [g])]
        made: Optimizer = given(flat) if callable(given) else given
        held = {id(one) for group in made.param_groups for one in group["params"]}
        if missing := sum(id(one) not in held for one in flat):
            why = f"does not hold {missing} of the {len(flat)} parameters that it should train"
            works = "pass a class, a name of torch.optim, or a function of the parameters"
            raise SettingError("optimizer", type(made).__name__, why, works)
        return made


def _names_of(make: Callable[..., Any], *arguments: Any, **settings: Any) -> set[str]:
    """Names of the arguments that a call passes."""
    signature = inspect.signature(make)
    bound = signature.bind(*arguments, **settings).arguments
    several = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    return {*bound.keys() - several}.union(*(bound[name] for name in several if name in bound))


REPLACED = ("make_actor", "make_critic", "optimizer")
"""Parts that a recipe asks for while it makes networks and optimizers."""
PARTS = (
    "collector", "update", "buffer", "advantage", "evaluate", "exploration_policy", "hooks",
    "logger", "loss_module", *REPLACED,
)  # fmt: skip
"""Parts that the caller of a recipe's ``build`` may give."""


def check_parts(given: Mapping[str, Any]) -> None:
    """Refuse parts that the caller of a recipe's ``build`` cannot replace."""
    for name, part in given.items():
        if name not in PARTS:
            works: Any = nearest_first(name, PARTS)[:3]
            works = "use make_loss=..., or Config(loss=...) for a name" if name == "loss" else works
            raise SettingError(name, part, "is no part of a trainer", works)


def check_replaced(cfg: RunConfig, parts: Replacements, algorithm: str) -> None:
    """Reject parts that the recipe does not use, and settings that replaced parts ignore."""
    asked, update = {*parts.asked}, parts.given.get("update", ...)
    if update is not ... and not hasattr(update, "optimizers"):
        asked |= {"loss_module", "optimizer"}  # TorchRL's steppers find both in the trainer
    for name in ("loss_module", *REPLACED):
        if name in parts.given and name not in asked:
            works: Any = [one for one in REPLACED if one in asked and one not in parts.given]
            works = "pass make_loss=..., a class or a function" if name == "loss_module" else works
            why = f"replaces nothing in {algorithm}" + ", given update" * (update is not ...)
            raise SettingError(name, name_of(parts.given[name]), why, works)
    for name, part in parts.without_effect.items():
        if hasattr(cfg, name):
            reject_unused(cfg, (name,), f"{part} replaces the part that it changes")


def check_update(cfg: RunConfig, made: Any) -> None:
    """Refuse settings that the update of a recipe, or its loss, was not made with."""
    own, loss = getattr(made, "compile", cfg.compile), getattr(made, "loss_module", None)
    if cfg.compile != "auto" and own != cfg.compile:
        why = f"is not that of the recipe's update, {own}"
        raise SettingError("compile", cfg.compile, why, "give Update(..., compile=cfg.compile)")
    if cfg.precision != "float32" and loss is not None and "forward" not in vars(loss):
        why = f"is not that of the recipe's loss, {type(loss).__name__}"
        works = "make it by experiment.make_loss(...)"
        raise SettingError("precision", cfg.precision, why, works)
