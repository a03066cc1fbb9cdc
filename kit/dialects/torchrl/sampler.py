"""How TorchRL's trainer counts the gradient steps of a sampler without replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.steps.counting import COUNTING_RULES, CountingRule, Fixed
from kit.steps.errors import SettingError

if TYPE_CHECKING:
    from kit.steps.updates import UpdatePlan


class IteratedSampler:
    """Gradient steps of a sampler without replacement that an epoch iterates over.

    An epoch draws at most ``limit`` minibatches. A pass that ends just at the limit is found to
    have ended only by the next epoch, which then draws nothing.

    Args:
        available: minibatches in a pass over the buffer.
        limit: minibatches that an epoch draws at most; ``None``: until the pass ends.
        epochs: epochs of one iteration.
    """

    def __init__(self, available: int, limit: int | None, epochs: int) -> None:
        self.available, self.epochs = available, epochs
        self.limit = available + 1 if limit is None else limit
        self.iteration = 0

    def after(self, iterations: int, *, attempts: bool = False) -> int:
        """Return the gradient steps of the first ``iterations``.

        Args:
            iterations: training iterations.
            attempts: whether to count as the trainer does, which adds one for each pass that is
                found to have ended.
        """
        epochs_of_pass = self.available // self.limit + 1
        passes, rest = divmod(iterations * self.epochs, epochs_of_pass)
        return passes * (self.available + attempts) + rest * self.limit

    def advance(self, policy_steps: int) -> int:
        """Return the gradient steps of the next iteration."""
        del policy_steps
        self.iteration += 1
        return self.after(self.iteration) - self.after(self.iteration - 1)

    def total(self, trainings: int, policy_steps: int) -> int:
        """Return the gradient steps of the first ``trainings`` iterations."""
        del policy_steps
        return self.after(trainings)

    def state_dict(self) -> dict[str, int]:
        """Return the iterations that have trained."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.iteration = int(state_dict["iteration"])


def _sampler(plan: UpdatePlan, argument: str) -> CountingRule:
    """``torchrl``: epochs over one iterator; ``torchrl:sample``: so many samples in each epoch."""
    if plan.update_epochs is None:
        raise SettingError("update_epochs", None, "is needed for counting=torchrl", [1])
    limit, epochs = plan.minibatches_per_epoch, plan.update_epochs
    if argument == "sample":
        return Fixed(epochs * (limit or 1))
    rows = plan.rows(2)
    size = plan.minibatch_size or max(rows, 1)
    available = rows // size if plan.last_minibatch == "drop" else -(-rows // size)
    return IteratedSampler(available, limit, epochs)


COUNTING_RULES["torchrl"] = _sampler
