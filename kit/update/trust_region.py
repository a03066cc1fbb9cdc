"""Trust region policy optimisation."""

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
"""Lower bound for divisors, so that a zero gradient yields a zero step."""


class TrustRegion(OptimizationStepper):
    """Moves a policy along the natural gradient within a bound on the KL divergence.

    Trust region policy optimisation (Schulman et al. 2015, appendix C). Conjugate gradients solve
    ``F x = g`` for the gradient g of the losses and the Fisher matrix F of the policy. The longest
    step along x has the KL divergence ``max_kl``, to second order. A line search shortens the step
    until the KL divergence is within the bound and the losses are smaller. If no step length
    succeeds, the policy is left unchanged.

    The update has no state and runs eagerly. Use :class:`~kit.hooks.FitCritic` to fit a critic.

    Args:
        loss_module: Returns a TensorDict of scalars. The sum of outputs named ``loss...`` is
            minimised, such as the surrogate of TorchRL's ``PPOLoss``.
        policy: Actor whose parameters are updated; must not be recurrent.
        max_kl: Largest mean KL divergence between the policies before and after a step.
        damping: Constant added to the diagonal of F.
        conjugate_gradient_steps: Number of conjugate gradient iterations.
        line_search_steps: Maximum number of step lengths that are tried.
        shrinkage: Ratio of each step length to the previous step length, in (0, 1).

    Raises:
        SettingError: If an argument is out of range, or a loss does not depend on the policy.
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
            name, reason = type(policy).__name__, "TRPO does not support recurrent policies"
            raise SettingError("policy", name, reason, "Use recipes.ppo_recurrent")
        Limits(0.0, open=True).check("max_kl", max_kl)
        if not 0 < shrinkage < 1:
            raise SettingError("shrinkage", shrinkage, "The value must be in (0, 1)", [0.8])
        self.loss_module, self.policy = loss_module, policy
        self.max_kl, self.shrinkage = max_kl, shrinkage
        self.damping = real_number("damping", damping, at_least=0.0)
        self.conjugate_gradient_steps = whole_number(
            "conjugate_gradient_steps", conjugate_gradient_steps, at_least=1
        )
        self.line_search_steps = whole_number("line_search_steps", line_search_steps, at_least=1)
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self._checked = False

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """Update the policy when called by TorchRL's trainer."""
        del trainer
        return TensorDict(self(sub_batch))

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Update the policy once, using a batch of any size.

        Returns:
            A dict of the loss's outputs before the step, ``kl`` (mean KL divergence after the
            step), ``step_share`` (step length as a fraction of the longest step) and ``grad_norm``.
        """
        before = self._distribution(batch)
        with torch.enable_grad():
            losses, objective = self._losses(batch)
            if not self._checked:
                self._check(losses)
            gradient = self._gradient(objective)
            # The policy's KL divergence from itself is zero and has a zero gradient, but not a zero
            # Hessian.
            divergence = _mean_divergence(before, self._distribution(batch))
            slope = self._gradient(divergence, create_graph=True)

            def fisher(vector: Tensor) -> Tensor:
                product = self._gradient(slope @ vector, retain_graph=True)
                return product + self.damping * vector

            norm = gradient.norm()
            unit = gradient / norm.clamp_min(_SMALLEST)  # Normalising removes the reward scale.
            direction = conjugate_gradients(fisher, unit, self.conjugate_gradient_steps)
            length = direction @ fisher(direction)
        longest = direction * (2 * self.max_kl / length.clamp_min(_SMALLEST)).sqrt()
        share, kl = self._search(batch, before, longest, objective)
        metrics = {name: scalar(value) for name, value in losses.items()}
        norm = norm.detach()
        return metrics | {"kl": kl, "step_share": kl.new_tensor(share), "grad_norm": norm}

    def _search(
        self, batch: TensorDictBase, before: Distribution, longest: Tensor, objective: Tensor
    ) -> tuple[float, Tensor]:
        """Apply the first step length that satisfies the bound and reduces the losses.

        Returns the length as a fraction of the longest step, and the KL divergence. Both are 0 if
        no step length succeeds.
        """
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
        losses = flat(self.loss_module(batch.copy()))
        return losses, total_of(losses).reshape(())

    def _check(self, losses: TensorDictBase) -> None:
        """Raise an error if a loss does not depend on the policy."""
        for name in losses_among(losses.keys()):
            loss = losses.get(name)
            # A loss of 0 may have been disabled by a coefficient of 0.
            if not any(reaches([loss], self.parameters)) and bool(loss != 0):
                reason = f"The returned {name} does not depend on the policy's parameters"
                hint = "Pass the policy that the loss evaluates, and fit the critic with FitCritic"
                raise SettingError("loss_module", type(self.loss_module).__name__, reason, hint)
        self._checked = True

    def _distribution(self, batch: TensorDictBase) -> Any:
        return self.policy.get_dist(batch.select(*self.policy.in_keys))

    def _gradient(self, value: Tensor, **kwargs: Any) -> Tensor:
        """Return the gradient of a scalar as a vector; unused parameters have zero gradients."""
        gradients = torch.autograd.grad(value, self.parameters, materialize_grads=True, **kwargs)
        return vector_of(gradients)

    def _set(self, vector: Tensor) -> None:
        for parameter, value in zip(self.parameters, parts_of(vector, self.parameters)):
            parameter.copy_(value)


def _mean_divergence(one: Any, other: Any) -> Tensor:
    if isinstance(one, CompositeDistribution):  # The components' KL divergences add up.
        parts = zip(one.dists.values(), other.dists.values())
        return torch.stack([_mean_divergence(*both) for both in parts]).sum()
    return kl_divergence(one, other).mean()


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], target: Tensor, iterations: int
) -> Tensor:
    """Solve ``A x = target`` for symmetric positive definite A (Hestenes and Stiefel 1952).

    Args:
        product: Function that multiplies A with a vector.
        target: Right-hand side, ``[size]``.
        iterations: Number of iterations; ``size`` iterations are exact up to rounding.
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
