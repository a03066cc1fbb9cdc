"""Values that change during a run, by a schedule of a counter."""

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


_OF_ENVIRONMENTS = ("env_steps", "episodes", "environment_errors")
"""Counters that the ledger otherwise has up to date with each row and checkpoint alone."""
_ALONE = (
    "leave one of the two out; recipes leave theirs out with lr_schedule=constant, "
    "and that of epsilon where epsilon_start=epsilon_end"
)


@dataclass
class _Value:
    """A number that a hook sets: an attribute of ``owner``, or an entry of a parameter group.

    ``group`` is the place of a parameter group in an optimiser, which replaces its groups when it
    is loaded. ``start`` and ``end`` belong to a schedule given by name.
    """

    owner: Any
    name: str
    group: int | None = None
    start: float | None = None
    end: float = 0.0
    schedule: Schedule | None = None
    asked: float | None = None
    """Last value set, in double precision."""
    written: float | None = None
    """The same value as it is stored; ``None`` on a device, where reading would wait."""

    @property
    def holder(self) -> Any:
        """The object or the parameter group."""
        return self.owner if self.group is None else self.owner.param_groups[self.group]

    def get(self) -> Any:
        """Return the present number or tensor."""
        holder = self.holder
        return holder[self.name] if isinstance(holder, dict) else getattr(holder, self.name)

    def set(self, value: float) -> None:
        """Fill a tensor in place, replace a number."""
        self.asked, present = value, self.get()
        if isinstance(present, Tensor):
            present.detach().fill_(value)
        elif isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)
        self.written = self.readable()

    def readable(self) -> float | None:
        """Return the present number, unless it is on a device."""
        present = self.get()
        return None if isinstance(present, Tensor) and not present.is_cpu else float(present)


class Anneal(KitHook):
    """Sets an attribute of an object to a schedule's value, once per iteration.

    The first iteration has the start value, and when the run has ended the value is exactly the end
    value. The value depends on the counter alone, so a resumed run continues where it was.

    Args:
        target: a loss, a module, an optimiser or one of its parameter groups.
        attribute: a number, a tensor (filled in place), or ``lr`` of an optimiser (of all its
            groups, each from its own start value).
        schedule: value by counter; or a name such as ``"linear"`` or ``"warmup 0.1 cosine"`` (see
            :func:`~kit.steps.make_schedule`): from the value at registration to ``end``.
            ``"constant"`` sets nothing and logs the value.
        end: last value of a schedule given by name.
        share_of_run: share of the run, in (0, 1], after which a schedule given by name ends.
        counter: counter of the ledger. By default ``policy_steps``, offline ``gradient_steps``; for
            a schedule given by name ``iterations`` if the policy steps are not known beforehand.
            ``env_steps`` and ``episodes`` on a GPU are waited for in every iteration.
        name: under which the value is logged.

    Raises:
        SettingError: if the counter stays 0 in the run or counts evaluations, the schedule is
            unknown, or something else sets the same value.
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
        """``lr_schedule`` and the name of the value."""
        return f"anneal_{self.label}"

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Set the schedule of every value and register, with a column named ``name``."""
        self.label = (name or self.label).removeprefix("anneal_")
        if self.schedule != "constant":
            for other, hook in trainer.registered_modules.items():
                if isinstance(hook, Anneal) and any(map(hook.sets, self.values)):
                    why = f"is registered already: {other} sets the same value"
                    raise SettingError("hook", self.name, why, _ALONE)
            late = ("evaluations", "evaluation_episodes")
            if self.counter in (*late, *(["policy_steps"] if trainer.plan.offline else [])):
                why = "has no new value when the value of the next iteration is set"
                raise SettingError("counter", self.counter, why, ["gradient_steps", "iterations"])
        self._set_schedules(trainer)
        super().register(trainer, self.name)

    def sets(self, value: _Value) -> bool:
        """Return whether this hook sets a value of another hook."""
        same = (one.holder is value.holder and one.name == value.name for one in self.values)
        return self.schedule != "constant" and any(same)

    def _set_schedules(self, trainer: HookedTrainer) -> None:
        """Set the schedule of every value: length and start value are fixed from here on."""
        self.counter = self.counter or _default_counter(self.schedule, trainer.plan)
        for optimizer in getattr(trainer.update, "optimizers", {}).values():
            for place, group in enumerate(optimizer.param_groups):
                for value in self.values:
                    if value.owner is group:
                        value.owner, value.group = optimizer, place
        if not isinstance(self.schedule, str):
            for value in self.values:
                value.get()  # raises where there is no such attribute
                value.schedule = self.schedule
        elif self.schedule != "constant":
            if trainer.ledger.iterations and any(value.start is None for value in self.values):
                why = "is added to a run that has begun, whose first value it cannot know"
                works = "add it before load(), or give a schedule such as Linear(1.0, 0.0, 10_000)"
                raise SettingError("hook", self.name, why, works)
            duration = round(_length(trainer.plan, self.counter) * self.share_of_run)
            starts = [float(one.get() if one.start is None else one.start) for one in self.values]
            if not any(starts) and all(one.start is None and not one.end for one in self.values):
                why = f"would go from 0 to 0 by the schedule {self.schedule!r}"
                works = "set it again, as after a run that has annealed it, or give end"
                raise SettingError(self.label, 0.0, why, works)
            for value, start in zip(self.values, starts):
                value.schedule = make_schedule(self.schedule, start, value.end, duration)

    def begin(self) -> None:
        """Set the values for the first iteration, whatever they were."""
        for value in self.values:
            value.asked = None
        self.set()

    def step(self) -> None:
        """Set the values for the next iteration; raise if something else has set one."""
        for value in self.values:
            if value.schedule is not None and (present := value.readable()) != value.written:
                why = f"was set by something else during the run, and {self.name} would overrule it"
                raise SettingError(self.label, present, why, _ALONE)
        if self.values[0].schedule is None:  # something else may have set it since
            self.value = self.values[0].readable()
        self.set()

    def set(self) -> None:
        """Set the values that the counter asks for."""
        assert self.counter is not None
        if self.counter in _OF_ENVIRONMENTS:
            self.trainer.batches.count_environment(self.trainer.ledger)
        count = getattr(self.trainer.ledger, self.counter)
        self.used = self.value
        for value in reversed(self.values):
            if value.schedule is None:
                self.value = value.readable()
            else:
                self.value = asked = value.schedule(count)
                if asked == value.asked and value.written is not None:
                    continue  # most often it has ended
                value.set(asked)

    def log(self, batch: Any) -> dict[str, Any]:
        """The value of the iteration that has ended, as a metric."""
        return {} if self.used is None else {f"schedule/{self.label}": self.used}


class AnnealLearningRate(Anneal):
    """Sets the learning rate of an optimiser to a schedule's value, once per iteration.

    Args:
        optimizer: all its parameter groups are set, each from its own initial learning rate.
        schedule: as in :class:`Anneal`.
        name: under which the learning rate is logged.
        **settings: other arguments of :class:`Anneal`.

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


def anneal_coefficients(loss: nn.Module, **schedules: str) -> list[Anneal]:
    """Hooks that anneal coefficients of a loss, such as ``clip_epsilon`` and ``entropy_coeff``.

    Args:
        loss: with a tensor for each coefficient, as TorchRL's losses have them.
        **schedules: by name of the coefficient, as in :class:`Anneal`.

    Raises:
        SettingError: if a coefficient that is to change is 0, where the loss has no such term.
    """
    changing = {name: kind for name, kind in schedules.items() if kind != "constant"}
    for name in changing:
        if getattr(loss, name, 0.0) is None:
            why = "leaves its term out of the loss: there is nothing to anneal"
            raise SettingError(name, 0.0, why, "use the schedule 'constant', or another value")
    return [Anneal(loss, name, kind) for name, kind in changing.items()]


class AnnealExploration(Anneal):
    """Lowers exploration noise from its initial to its final value, once per iteration.

    The values are ``eps_init`` and ``eps_end``, or ``sigma_init`` and ``sigma_end``, of the noise
    module. Its ``step()`` and ``annealing_num_steps`` are not needed.

    Args:
        policy: TorchRL's ``EGreedyModule``, ``AdditiveGaussianModule`` or
            ``OrnsteinUhlenbeckProcessModule``, the kit's versions of them, or a policy with one.
        schedule: as in :class:`Anneal`.
        name: under which the value is logged.
        **settings: ``share_of_run`` and ``counter`` of :class:`Anneal`.

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
            why = "has no exploration noise that could be annealed"
            works = "give an EGreedyModule, a GaussianNoise or an OrnsteinUhlenbeckNoise"
            raise SettingError("policy", type(policy).__name__, why, works)
        super().__init__(*found[0], schedule, name=name, **settings)
        self.values = []
        for module, noise in found:
            start, end = (float(getattr(module, f"{noise}_{which}")) for which in ("init", "end"))
            self.values.append(_Value(module, noise, start=start, end=end))

    def end(self) -> None:
        """Set the final values, with which a policy is played after training."""
        for value in self.values:
            if value.schedule is not None:
                value.set(value.end)


def scales_of(module: nn.Module) -> list[str]:
    """Names of the scales of exploration noise that a module has."""
    names = ("eps", "sigma")
    return [one for one in names if hasattr(module, one) and hasattr(module, f"{one}_end")]


def anneal_epsilon(explore: nn.Module, cfg: Any, plan: StepPlan) -> AnnealExploration:
    """Return the hook that lowers epsilon according to the settings of DQN.

    Args:
        explore: module of the policy that acts at random with probability epsilon.
        cfg: settings with ``epsilon_start`` and ``epsilon_decay``, or ``exploration_share``.
        plan: a decay begins after an iteration that fills the buffer at random.

    Raises:
        SettingError: if ``exploration_share`` has no effect.
    """
    if cfg.epsilon_decay is None:
        falls = cfg.epsilon_start != cfg.epsilon_end  # else a schedule of one's own may set it
        schedule = "linear" if falls else "constant"
        if not falls:
            checks.reject_unused(
                cfg, ("exploration_share",), "epsilon_start=epsilon_end, and none falls"
            )
        return AnnealExploration(explore, schedule, share_of_run=cfg.exploration_share)
    without_share = f"epsilon_decay={cfg.epsilon_decay} falls throughout the run"
    checks.reject_unused(cfg, ("exploration_share",), without_share)
    begin = int(plan.prefill_is_iteration)
    falling = Decay(cfg.epsilon_start, cfg.epsilon_decay, cfg.epsilon_end, begin)
    return AnnealExploration(explore, falling, counter="iterations")


class EndOfExploration(KitHook):
    """Sets ``exploring`` of a loss module: true during the plan's ``exploration_steps``."""

    kind: Kind = "step"
    operations: ClassVar = {"pre_optim_steps": "look"}

    def __init__(self, loss_module: Any) -> None:
        self.loss_module = loss_module

    def look(self) -> None:
        """Set the attribute before an update."""
        trainer = self.trainer
        self.loss_module.exploring = trainer.policy_steps <= trainer.plan.exploration_steps


def _default_counter(schedule: Schedule | str, plan: StepPlan) -> str:
    if plan.offline:
        return "gradient_steps"
    if not isinstance(schedule, str) or (plan.total_policy_steps and plan.is_exact):
        return "policy_steps"
    return "policy_steps" if plan.iterations is None else "iterations"


def _length(plan: StepPlan, counter: str) -> int:
    """What a counter of the ledger reaches at the end of the run."""
    if plan.iterations == 0:
        return 1  # no value is used
    known = {"policy_steps": plan.total_policy_steps, "iterations": plan.iterations}
    length: int | None = known.get(counter)
    if counter not in known and can_count(plan):
        length = getattr(plan.after(plan.iterations), counter, None)
    if not length:
        why = "has no end that is known beforehand" if length is None else "stays 0 in this run"
        raise SettingError("counter", counter, why, [name for name, end in known.items() if end])
    return length
