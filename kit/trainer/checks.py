"""Whether the parts of a trainer fit together: found out before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl.trainers import OptimizationStepper

from kit.steps import SettingError
from kit.update import Update

if TYPE_CHECKING:
    from kit.trainer.trainer import Trainer


def check_parts(trainer: Trainer) -> None:
    """Refuse parts that contradict the plan.

    Raises:
        SettingError: if the plan's evaluations or gradient steps would be left undone, or if the
            evaluator plays another number of episodes than planned.
    """
    plan = trainer.plan
    evaluations = plan.evaluation_every or plan.evaluation_every_iterations
    evaluations = evaluations or plan.initial_evaluations or plan.final_evaluation
    if trainer.evaluate is None and evaluations:
        raise SettingError(
            "evaluate",
            None,
            "leaves the evaluations of the plan undone",
            "give an Evaluator, or a plan with evaluation_every=None and final_evaluation=False",
        )
    if trainer.evaluate is not None and trainer.evaluate.episodes != plan.evaluation_episodes:
        raise SettingError(
            "evaluate",
            trainer.evaluate.episodes,
            "episodes are not those of the plan",
            [plan.evaluation_episodes],
        )
    if trainer.trains and trainer.update is None and trainer.loss_module is None:
        raise SettingError(
            "update",
            None,
            "leaves the plan's gradient steps undone",
            "give an Update, or a loss_module and a hook at stage 'optimizer'",
        )


def check_hooks(trainer: Trainer) -> None:
    """Refuse hooks that leave gradient steps undone, or that no gradient step would call.

    Raises:
        SettingError: if nobody makes the gradient steps, or if a stepper of TorchRL makes them,
            which calls no hook between loss and optimiser.
    """
    if not trainer.trains:
        return
    if trainer.update is None and not trainer.stages["optimizer"]:
        raise SettingError(
            "update",
            None,
            "leaves the plan's gradient steps undone",
            "give an Update, or register a hook at stage 'optimizer'",
        )
    stepper = trainer.update
    if isinstance(stepper, OptimizationStepper) and not isinstance(stepper, Update):
        for stage in ("process_loss", "optimizer"):
            for operation in trainer.stages[stage]:
                raise SettingError(
                    "stage",
                    stage,
                    f"never runs, so {operation.name} never would: {type(stepper).__name__} goes "
                    "from loss to optimiser by itself",
                    "use kit.update.Update, or leave out the stepper",
                )
