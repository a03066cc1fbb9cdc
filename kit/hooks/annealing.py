"""Hooks that anneal a value during a run, using a schedule over a step counter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from kit.config import checks
from kit.hooks.base import HookedTrainer, Kind, KitHook
from kit.steps import Decay, Schedule, SettingError, make_schedule
from kit.steps.counts import can_count
from kit.steps.errors import real_number

if TYPE_CHECKING:
    from kit.steps import StepPlan
    from kit.update import Update


_LAZY_COUNTERS = ("env_steps", "episodes", "environment_errors")
"""Counters that are normally updated only for a metrics row or a checkpoint."""
_REMOVE_ONE = (
    "remove one of the two hooks. Recipes add no learning-rate hook if lr_schedule=constant, "
    "and no epsilon hook if epsilon_start equals epsilon_end"
)


@dataclass
class _Value:
    """A scheduled value: an attribute of ``owner``, or an entry in an optimiser's parameter group.

    ``group`` is an index rather than the group itself, because loading an optimiser replaces its
    group dictionaries. ``start`` and ``end`` apply only to a schedule that is given by name.
    """

    owner: Any
    name: str
    group: int | None = None
    start: float | None = None
    end: float = 0.0
    schedule: Schedule | None = None
    asked: float | None = None
    """Value that was last set, in double precision."""
    written: float | None = None
    """Value that was last set, in its stored precision; ``None`` on a GPU, to avoid a sync."""

    @property
    def holder(self) -> Any:
        """The object or parameter group that stores the value."""
        return self.owner if self.group is None else self.owner.param_groups[self.group]

    def get(self) -> Any:
        """Return the current value, a float or a tensor."""
        holder = self.holder
        return holder[self.name] if isinstance(holder, dict) else getattr(holder, self.name)

    def set(self, value: float) -> None:
        """Set the value. Tensors are filled in place."""
        self.asked, present = value, self.get()
        if isinstance(present, Tensor):
            present.detach().fill_(value)
        elif isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)
        self.written = self.readable()

    def readable(self) -> float | None:
        """Return the current value as a float, or ``None`` if it is stored on a GPU."""
        present = self.get()
        return None if isinstance(present, Tensor) and not present.is_cpu else float(present)


class Anneal(KitHook):
    """Sets an object's attribute to a scheduled value once per iteration.

    The first iteration uses exactly the start value, and the run ends with exactly the end value.
    The value depends only on the counter, so a resumed run continues the schedule.

    Args:
        target: loss, module, optimiser, or an optimiser's parameter group.
        attribute: name of a float or tensor attribute (tensors are filled in place), or ``lr`` of
            an optimiser. ``lr`` sets all parameter groups, each from its initial learning rate.
        schedule: function that maps the counter to the value, or a schedule name such as
            ``"linear"`` or ``"warmup 0.1 cosine"`` (see :func:`~kit.steps.make_schedule`). A named
            schedule runs from the value at registration to ``end``. ``"constant"`` only logs the
            value.
        end: final value of a named schedule.
        share_of_run: fraction of the run, in (0, 1], after which a named schedule ends.
        counter: ledger counter that drives the schedule. Defaults to ``policy_steps``, to
            ``gradient_steps`` for offline runs, or to ``iterations`` for a named schedule if the
            total number of policy steps is unknown or the schedule is ``"exponential FACTOR"``. On
            a GPU, reading ``env_steps`` or ``episodes`` synchronises in every iteration.
        name: name of the logged metric.

    Raises:
        SettingError: if the counter stays 0 during the run or counts evaluations, the schedule is
            unknown, or another hook sets the same value.
    """

    kind = "step"
    operations: ClassVar = {"setup": "begin", "post_steps": "step", "post_steps_log": "log"}

    def __init__(
        self,
        target: Any,
        attribute: str,
        schedule: Schedule | str,
        *,
        end: float = 0.0,
        share_of_run: float = 1.0,
        counter: str | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(schedule, str):
            make_schedule(schedule, 1.0, 1.0, 1_000)
        self.share_of_run = real_number("share_of_run", share_of_run, at_least=0, at_most=1)
        self.schedule, self.counter = schedule, counter
        self.label = name or attribute
        groups = range(len(target.param_groups)) if isinstance(target, Optimizer) else [None]
        self.values = [_Value(target, attribute, group, end=end) for group in groups]
        self.value: float | None = None
        self.used: float | None = None

    @property
    def name(self) -> str:
        """Name of the hook: ``anneal_`` followed by the name of the annealed value."""
        return f"anneal_{self.label}"

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Create the schedules and register the hook under ``name``."""
        self.label = (name or self.label).removeprefix("anneal_")
        if self.schedule != "constant":
            for other, hook in trainer.registered_modules.items():
                if isinstance(hook, Anneal) and any(map(hook.sets, self.values)):
                    reason = f"sets the same value as the registered hook {other}"
                    raise SettingError("hook", self.name, reason, _REMOVE_ONE)
            stale = ("evaluations", "evaluation_episodes")
            if self.counter in (*stale, *(["policy_steps"] if trainer.plan.offline else [])):
                reason = "is not updated before the next iteration's value is set"
                counters = ["gradient_steps", "iterations"]
                raise SettingError("counter", self.counter, reason, counters)
        self._set_schedules(trainer)
        super().register(trainer, self.name)

    def sets(self, value: _Value) -> bool:
        """Return whether this hook also sets ``value``, which belongs to another hook."""
        same = (one.holder is value.holder and one.name == value.name for one in self.values)
        return self.schedule != "constant" and any(same)

    def _set_schedules(self, trainer: HookedTrainer) -> None:
        """Assign a schedule to each value; named schedules get a fixed start and duration."""
        self.counter = self.counter or _default_counter(self.schedule, trainer.plan)
        for optimizer in getattr(trainer.update, "optimizers", {}).values():
            for place, group in enumerate(optimizer.param_groups):
                for value in self.values:
                    if value.owner is group:
                        value.owner, value.group = optimizer, place
        if not isinstance(self.schedule, str):
            for value in self.values:
                value.get()  # raises AttributeError if the attribute does not exist
                value.schedule = self.schedule
        elif self.schedule != "constant":
            if trainer.ledger.iterations and any(value.start is None for value in self.values):
                reason = "was added after the run began, so its start value is unknown"
                hint = "add it before load(), or pass a schedule such as Linear(1.0, 0.0, 10_000)"
                raise SettingError("hook", self.name, reason, hint)
            duration = round(_length(trainer.plan, self.counter) * self.share_of_run)
            starts = [float(one.get() if one.start is None else one.start) for one in self.values]
            if not any(starts) and all(one.start is None and not one.end for one in self.values):
                reason = f"would stay 0, because the schedule {self.schedule!r} also ends at 0"
                hint = "set a nonzero start value, or pass a nonzero end to the hook"
                raise SettingError(self.label, 0.0, reason, hint)
            for value, start in zip(self.values, starts):
                value.schedule = make_schedule(self.schedule, start, value.end, duration)

    def begin(self) -> None:
        """Set the values for the first iteration."""
        for value in self.values:
            value.asked = None
        self.set()

    def step(self) -> None:
        """Set the values for the next iteration. Raise an error if other code changed a value."""
        for value in self.values:
            if value.schedule is not None and (present := value.readable()) != value.written:
                reason = f"was set by other code during the run, and {self.name} would overwrite it"
                raise SettingError(self.label, present, reason, _REMOVE_ONE)
        if self.values[0].schedule is None:  # other code may have changed a constant value
            self.value = self.values[0].readable()
        self.set()

    def set(self) -> None:
        """Set the values that the schedules return for the current counter."""
        assert self.counter is not None
        if self.counter in _LAZY_COUNTERS:
            self.trainer.batches.count_environment(self.trainer.ledger)
        count = getattr(self.trainer.ledger, self.counter)
        self.used = self.value
        for value in reversed(self.values):
            if value.schedule is None:
                self.value = value.readable()
            else:
                self.value = asked = value.schedule(count)
                if asked == value.asked and value.written is not None:
                    continue  # the value is already set, for example because the schedule has ended
                value.set(asked)

    def log(self, batch: Any) -> dict[str, Any]:
        """Return the value used in the last iteration as a metric."""
        return {} if self.used is None else {f"schedule/{self.label}": self.used}


class AnnealLearningRate(Anneal):
    """Sets an optimiser's learning rate to a scheduled value once per iteration.

    Args:
        optimizer: optimiser. Each parameter group starts from its initial learning rate.
        schedule: function or schedule name, as in :class:`Anneal`.
        name: name of the logged metric.
        **settings: other arguments for :class:`Anneal`.

    Examples:
        >>> from torch import nn
        >>> optimizer = torch.optim.Adam(nn.Linear(2, 1).parameters(), lr=1e-3)
        >>> AnnealLearningRate(optimizer, "linear").name
        'anneal_learning_rate'
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule | str = "linear",
        *,
        name: str = "learning_rate",
        **settings: Any,
    ) -> None:
        super().__init__(optimizer, "lr", schedule, name=name, **settings)


def anneal_learning_rates(update: Update, schedule: str) -> list[Anneal]:
    """Create one hook per optimiser that anneals its learning rate; none for ``constant``."""
    named = update.optimizers.items() if schedule != "constant" else ()
    return [
        AnnealLearningRate(one, schedule, name="_".join(filter(None, ("learning_rate", name))))
        for name, one in named
    ]


def anneal_coefficients(loss: nn.Module, **schedules: str) -> list[Anneal]:
    """Create hooks that anneal loss coefficients such as ``clip_epsilon``.

    Args:
        loss: loss that stores each coefficient as a tensor, as TorchRL losses do.
        **schedules: name of the schedule for each coefficient, as in :class:`Anneal`.

    Raises:
        SettingError: if a coefficient to anneal is 0, because the loss then omits its term.
    """
    changing = {name: kind for name, kind in schedules.items() if kind != "constant"}
    for name in changing:
        if getattr(loss, name, 0.0) is None:
            reason = "removes the coefficient's term from the loss, so it cannot be annealed"
            raise SettingError(name, 0.0, reason, "use the schedule 'constant' or a nonzero value")
    return [Anneal(loss, name, kind) for name, kind in changing.items()]


class AnnealExploration(Anneal):
    """Anneals the exploration noise scale from its initial to its final value.

    The scale is updated once per iteration. The noise module stores its initial and final values as
    ``eps_init`` and ``eps_end``, or as ``sigma_init`` and ``sigma_end``. The module's ``step()``
    and ``annealing_num_steps`` are not used.

    Args:
        policy: TorchRL's ``EGreedyModule``, ``AdditiveGaussianModule`` or
            ``OrnsteinUhlenbeckProcessModule``, kit's versions of these modules, or a policy that
            contains such a module.
        schedule: function or schedule name, as in :class:`Anneal`.
        name: name of the logged metric.
        **settings: ``share_of_run`` and ``counter``, as in :class:`Anneal`.

    Raises:
        SettingError: if the policy has no noise that can be annealed.

    Examples:
        >>> from torchrl.data import OneHot
        >>> from torchrl.modules import EGreedyModule
        >>> noise = EGreedyModule(spec=OneHot(2), eps_init=1.0, eps_end=0.05)
        >>> AnnealExploration(noise, share_of_run=0.1).name
        'anneal_exploration'
    """

    def __init__(
        self,
        policy: nn.Module,
        schedule: Schedule | str = "linear",
        *,
        name: str = "exploration",
        **settings: Any,
    ) -> None:
        found = [(module, name) for module in policy.modules() for name in scales_of(module)]
        if not found:
            reason = "has no exploration noise that can be annealed"
            hint = "pass an EGreedyModule, GaussianNoise or OrnsteinUhlenbeckNoise"
            raise SettingError("policy", type(policy).__name__, reason, hint)
        super().__init__(*found[0], schedule, name=name, **settings)
        self.values = []
        for module, noise in found:
            start, end = (float(getattr(module, f"{noise}_{which}")) for which in ("init", "end"))
            self.values.append(_Value(module, noise, start=start, end=end))

    def end(self) -> None:
        """Set the noise scales to their final values for use after training."""
        for value in self.values:
            if value.schedule is not None:
                value.set(value.end)


def scales_of(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes that store exploration noise scales."""
    names = ("eps", "sigma")
    return [one for one in names if hasattr(module, one) and hasattr(module, f"{one}_end")]


def anneal_epsilon(explore: nn.Module, cfg: Any, plan: StepPlan) -> AnnealExploration:
    """Create the hook that decays epsilon according to DQN's settings.

    Args:
        explore: module that samples random actions with probability epsilon.
        cfg: config with the fields ``epsilon_start``, ``epsilon_end``, ``epsilon_decay`` and
            ``exploration_share``.
        plan: step plan. If it begins with a random prefill iteration, an exponential decay starts
            after this iteration.

    Raises:
        SettingError: if ``exploration_share`` is set but has no effect.
    """
    if cfg.epsilon_decay is None:
        falls = cfg.epsilon_start != cfg.epsilon_end  # a custom hook may set a constant epsilon
        schedule = "linear" if falls else "constant"
        if not falls:
            checks.reject_unused(
                cfg, ("exploration_share",), "epsilon_start=epsilon_end is constant"
            )
        return AnnealExploration(explore, schedule, share_of_run=cfg.exploration_share)
    without_share = f"epsilon_decay={cfg.epsilon_decay} decays throughout the run"
    checks.reject_unused(cfg, ("exploration_share",), without_share)
    begin = int(plan.prefill_is_iteration)
    falling = Decay(cfg.epsilon_start, cfg.epsilon_decay, cfg.epsilon_end, begin)
    return AnnealExploration(explore, falling, counter="iterations")


class EndOfExploration(KitHook):
    """Sets a loss module's ``exploring`` flag during the plan's ``exploration_steps``."""

    kind: Kind = "step"
    operations: ClassVar = {"pre_optim_steps": "look"}

    def __init__(self, loss_module: Any) -> None:
        self.loss_module = loss_module

    def look(self) -> None:
        """Update the loss module's ``exploring`` flag before an update phase."""
        trainer = self.trainer
        self.loss_module.exploring = trainer.policy_steps <= trainer.plan.exploration_steps


def _default_counter(schedule: Schedule | str, plan: StepPlan) -> str:
    if plan.offline:
        return "gradient_steps"
    if isinstance(schedule, str) and "exponential " in schedule:
        return "iterations"
    if not isinstance(schedule, str) or (plan.total_policy_steps and plan.is_exact):
        return "policy_steps"
    return "policy_steps" if plan.iterations is None else "iterations"


def _length(plan: StepPlan, counter: str) -> int:
    """Return the value of a ledger counter at the end of the run."""
    if plan.iterations == 0:
        return 1  # the length is not used if there are no iterations
    known = {"policy_steps": plan.total_policy_steps, "iterations": plan.iterations}
    length: int | None = known.get(counter)
    if counter not in known and can_count(plan):
        length = getattr(plan.after(plan.iterations), counter, None)
    if not length:
        reason = "has no known total in this run" if length is None else "stays 0 in this run"
        raise SettingError("counter", counter, reason, [name for name, end in known.items() if end])
    return length
