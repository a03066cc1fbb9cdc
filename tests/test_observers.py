"""An observer that changes what it is given is refused; a step hook may."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from kit.hooks import Hook
from kit.steps import SettingError
from kit.trainer.observers import Given
from kit.trainer.stages import SIGNATURES, STAGES, HookError
from tests.tiny import Rows, off_policy_plan, on_policy_plan, ppo_trainer, sac_trainer

GIVEN = [name for name, stage in STAGES.items() if stage.signature in ("pipe", "log", "losses")]
"""Stages whose hooks are given a TensorDict."""
SECOND = 2
"""Call in which a hook changes something: what was right once is looked at again."""


def scale(given: TensorDictBase) -> None:
    first(given).mul_(2)


def first(given: TensorDictBase) -> torch.Tensor:
    return next(v for v in given.values(True, True) if v.is_floating_point()).detach()


CHANGES: dict[str, Callable[[TensorDictBase], Any]] = {
    "in place": scale,
    "a row of it": lambda given: first(given)[0].fill_(7.0),
    "by another value": lambda given: given.set(min(given.keys()), torch.ones(given.shape)),
    "a new entry": lambda given: given.set("mine", torch.zeros(given.shape)),
    "an entry less": lambda given: given.pop(min(given.keys())),
}


class Meddler(Hook):
    """Changes what it is given, in its second call."""

    def __init__(self, stage: str, change: Callable[[TensorDictBase], Any]) -> None:
        self.stage, self.change, self.calls = stage, change, 0

    def register(self, trainer: Any, name: str | None = None) -> None:
        super().register(trainer, name)
        arguments = SIGNATURES[STAGES[self.stage].signature][1]
        trainer.register_op(self.stage, self.losses if arguments == 2 else self.meddle)

    def meddle(self, given: TensorDictBase) -> None:
        self.calls += 1
        if self.calls == SECOND:
            self.change(given)

    def losses(self, minibatch: TensorDictBase, losses: TensorDictBase) -> None:
        self.meddle(losses)


class MayMeddle(Meddler):
    kind = "step"


def run(*hooks: Hook, of: str = "ppo") -> Any:
    trainer = ppo_trainer(hooks=hooks) if of == "ppo" else sac_trainer(hooks=hooks)
    trainer.run()
    return trainer


# ---------------------------------------------------------------------- at every stage
@pytest.mark.parametrize("of", ["ppo", "sac"])
@pytest.mark.parametrize("stage", GIVEN)
def test_an_observer_that_writes_to_what_it_is_given_is_refused_at_every_stage(stage, of):
    hook = Meddler(stage, scale)
    with pytest.raises(HookError) as caught:
        run(hook, of=of)
    assert (caught.value.hook.split(".")[0], caught.value.stage) == ("Meddler", stage)
    assert 'and it is an observer: give its class kind = "step"' in str(caught.value)
    assert hook.calls == SECOND


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_kind_of_change_is_seen_and_named(change):
    seen: list[TensorDictBase] = []
    hook = Meddler("pre_epoch", lambda given: (seen.append(given.clone(False)), change(given)))
    with pytest.raises(HookError) as caught:
        run(hook)
    names = {str(key) for key in seen[0].keys(True, True)} | {"mine"}
    said = [f"it changed {name} of the TensorDict that it is given" for name in names]
    assert sum(one in str(caught.value) for one in said) == 1


def test_an_observer_that_returns_another_batch_is_refused():
    class Replaces(Hook):
        operations = {"pre_epoch": "replace"}  # noqa: RUF012

        def replace(self, batch: TensorDictBase) -> TensorDictBase:
            return batch.clone()

    with pytest.raises(HookError, match="it returned another TensorDict that it is given"):
        run(Replaces())


def test_an_observer_in_place_of_the_gradient_step_is_refused():
    class Optimizes(Hook):
        operations = {"optimizer": "step"}  # noqa: RUF012

        def step(self, losses: Any, clip: bool, norm: Any, index: int) -> None:
            """It would."""

    with pytest.raises(SettingError, match="is an observer, and would make gradient steps; give"):
        ppo_trainer(hooks=[Optimizes()])


# ---------------------------------------------------------------------- what is allowed
@pytest.mark.parametrize("stage", ["batch_process", "process_optim_batch", "process_loss"])
def test_a_step_hook_may_change_it(stage):
    hook = MayMeddle(stage, scale)
    assert run(hook).ledger.policy_steps == on_policy_plan().total_policy_steps
    assert hook.calls >= SECOND


@pytest.mark.parametrize("of", ["ppo", "sac"])
@pytest.mark.parametrize("stage", GIVEN)
def test_an_observer_may_look_and_change_a_clone(stage, of):
    looked = Meddler(stage, lambda given: scale(given.clone()))
    plan = {"ppo": on_policy_plan, "sac": off_policy_plan}[of]()
    assert run(looked, of=of).ledger.policy_steps == plan.total_policy_steps
    assert looked.calls >= SECOND


def test_functions_that_belong_to_no_observer_are_left_alone():
    def double(batch: TensorDictBase) -> None:
        batch["next", "reward"].mul_(2)

    trainer = ppo_trainer()
    trainer.register_op("batch_process", double)
    assert trainer.run().policy_steps == 64


def test_a_method_with_arguments_already_given_is_one_of_the_observer():
    class Partly(Hook):
        def register(self, trainer: Any, name: str | None = None) -> None:
            super().register(trainer, name)
            trainer.register_op("batch_process", functools.partial(self.look, 2.0))

        def look(self, factor: float, batch: TensorDictBase) -> None:
            batch["next", "reward"].mul_(factor)

    with pytest.raises(HookError, match=r"it changed \('next', 'reward'\) of"):
        run(Partly())


# ---------------------------------------------------------------------- other TensorDicts
def test_what_is_stacked_when_it_is_asked_for_is_not_taken_to_be_changed():
    stacked = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)])
    given = Given((stacked, Rows(), None))
    assert given.changed() == ""
    stacked.set("b", torch.zeros(3, 2))
    assert given.changed() == "b"


def test_tensors_of_inference_mode_are_compared_as_objects():
    with torch.inference_mode():
        made = TensorDict({"a": torch.zeros(2)}, [2])
    given = Given((made,))
    assert given.changed() == ""
    made["a"] = torch.ones(2)
    assert given.changed() == "a"
