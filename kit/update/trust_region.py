"""Trust region policy optimisation: the longest step that changes the policy little enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor, nn
from torch.distributions import Distribution, kl_divergence
from torchrl.trainers import OptimizationStepper

from kit.fast.vectors import parts_of, vector_of
from kit.logging.metrics import scalar
from kit.steps import SettingError
from kit.steps.errors import Limits, real_number, whole_number
from kit.update.groups import flat, losses_among, reaches, total_of

_SMALLEST = 1e-12
"""Smallest divisor: where the gradient is zero, so is the step."""


class TrustRegion(OptimizationStepper):
    """Moves a policy along the natural gradient, as far as a bound on the KL divergence allows.

    Trust region policy optimisation (Schulman et al. 2015, appendix C): conjugate gradients solve
    ``F x = g`` for the gradient g of the losses and the Fisher matrix F of the policy. The step in
    that direction has the divergence ``max_kl`` to second order. It is shortened until the
    divergence is within the bound and the losses are smaller; if no length achieves this, the
    policy is left unchanged.

    It has no state and runs eagerly. A critic is fitted by :class:`~kit.hooks.FitCritic`.

    Args:
        loss_module: returns a TensorDict of scalars. The sum of those named ``loss...`` is
            minimised, such as the surrogate of TorchRL's ``PPOLoss``.
        policy: actor whose parameters are changed; not recurrent.
        max_kl: largest mean divergence of the policy after a step from the policy before it.
        damping: added to the diagonal of F.
        conjugate_gradient_steps: iterations of the method, each a product with F.
        line_search_steps: lengths that are tried.
        shrinkage: ratio of each length to the previous one, in (0, 1).

    Raises:
        SettingError: if a setting is outside its limits; at the first step, if a loss does not
            depend on the policy.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        policy: Any,
        *,
        max_kl: float = 0.01,
        damping: float = 0.1,
        conjugate_gradient_steps: int = 10,
        line_search_steps: int = 10,
        shrinkage: float = 0.8,
    ) -> None:
        if "is_init" in policy.in_keys:
            works = "use recipes.ppo_recurrent"
            raise SettingError("policy", type(policy).__name__, "is recurrent", works)
        Limits(0.0, open=True).check("max_kl", max_kl)
        if not 0 < shrinkage < 1:
            raise SettingError("shrinkage", shrinkage, "is not between 0 and 1", [0.8])
        self.loss_module, self.policy = loss_module, policy
        self.max_kl, self.shrinkage = max_kl, shrinkage
        self.damping = real_number("damping", damping, at_least=0.0)
        self.conjugate_gradient_steps = whole_number(
            "conjugate_gradient_steps", conjugate_gradient_steps, at_least=1
        )
        self.line_search_steps = whole_number("line_search_steps", line_search_steps, at_least=1)
        self.parameters = [one for one in policy.parameters() if one.requires_grad]
        self._checked = False

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """Make one step, as a trainer asks for it."""
        del trainer
        return TensorDict(self(sub_batch))

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Make one step on a batch of any size.

        Returns:
            Outputs of the loss before the step; ``kl``, the mean divergence after it;
            ``step_share``, its share of the longest step; and ``grad_norm``.
        """
        before = self._distribution(batch)
        with torch.enable_grad():
            losses, objective = self._losses(batch)
            if not self._checked:
                self._check(losses)
            gradient = self._gradient(objective)
            # The divergence from itself is zero, and so is its slope, but not its curvature.
            divergence = _mean_divergence(before, self._distribution(batch))
            slope = self._gradient(divergence, create_graph=True)

            def fisher(vector: Tensor) -> Tensor:
                product = self._gradient(slope @ vector, retain_graph=True)
                return product + self.damping * vector

            norm = gradient.norm()
            unit = gradient / norm.clamp_min(_SMALLEST)  # no scale of rewards is too small
            direction = conjugate_gradients(fisher, unit, self.conjugate_gradient_steps)
            length = direction @ fisher(direction)
        longest = direction * (2 * self.max_kl / length.clamp_min(_SMALLEST)).sqrt()
        share, kl = self._search(batch, before, longest, objective)
        metrics = {name: scalar(value) for name, value in losses.items()}
        found = {"kl": kl, "step_share": kl.new_tensor(share), "grad_norm": norm.detach()}
        return metrics | found

    def _search(
        self, batch: TensorDictBase, before: Distribution, longest: Tensor, objective: Tensor
    ) -> tuple[float, Tensor]:
        """Take the first step that is within the bound and an improvement; share and divergence."""
        start = vector_of(self.parameters).clone()
        for trial in range(self.line_search_steps):
            share = self.shrinkage**trial
            self._set(start - share * longest)
            _, reached = self._losses(batch)
            kl = _mean_divergence(before, self._distribution(batch))
            if bool((reached < objective) & (kl <= self.max_kl)):
                return share, kl
        self._set(start)
        return 0.0, torch.zeros_like(objective)

    def _losses(self, batch: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
        """What the loss returns, and the sum that is minimised."""
        losses = flat(self.loss_module(batch.copy()))
        return losses, total_of(losses).reshape(())

    def _check(self, losses: TensorDictBase) -> None:
        """Raise an error, before the first step, if a loss does not depend on the policy."""
        for name in losses_among(losses.keys()):
            loss = losses.get(name)
            # A weight of 0 leaves a loss out.
            if not any(reaches([loss], self.parameters)) and bool(loss != 0):
                why = f"returns {name}, which depends on nothing that the policy's step changes"
                works = "give it the same policy and no critic, and fit the critic by FitCritic"
                raise SettingError("loss_module", type(self.loss_module).__name__, why, works)
        self._checked = True

    def _distribution(self, batch: TensorDictBase) -> Any:
        return self.policy.get_dist(batch.select(*self.policy.in_keys))

    def _gradient(self, of: Tensor, **how: Any) -> Tensor:
        """The gradient of a number as one vector; zero where a parameter has no part in it."""
        return vector_of(torch.autograd.grad(of, self.parameters, materialize_grads=True, **how))

    def _set(self, vector: Tensor) -> None:
        """Change the parameters where they are."""
        for parameter, value in zip(self.parameters, parts_of(vector, self.parameters)):
            parameter.copy_(value)


def _mean_divergence(one: Any, other: Any) -> Tensor:
    if isinstance(one, CompositeDistribution):  # of several actions, each chosen on its own
        parts = zip(one.dists.values(), other.dists.values())
        return torch.stack([_mean_divergence(*both) for both in parts]).sum()
    return kl_divergence(one, other).mean()


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], target: Tensor, iterations: int
) -> Tensor:
    """Solve ``A x = target`` for a symmetric positive matrix (Hestenes and Stiefel 1952).

    Args:
        product: A times a vector.
        target: ``[size]``.
        iterations: at most; as many as the size solve it but for rounding.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    along, squared = residual, residual @ residual
    for _ in range(iterations):
        image = product(along)
        rate = squared / (along @ image).clamp_min(_SMALLEST)
        solution = solution + rate * along
        residual = residual - rate * image
        before, squared = squared, residual @ residual
        along = residual + squared / before.clamp_min(_SMALLEST) * along
    return solution
