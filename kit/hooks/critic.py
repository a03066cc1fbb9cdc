"""Hook that fits a critic to each batch with a separate optimiser."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.optim import Adam
from torchrl.objectives.utils import distance_loss

from kit.advantages import GAE
from kit.buffers.rollout_batches import valid_rows
from kit.config import FittedCriticConfig
from kit.hooks.annealing import AnnealLearningRate
from kit.hooks.base import Kind, KitHook
from kit.logging.metrics import MetricMeans
from kit.steps.errors import SettingError, whole_number
from kit.update import Compile, Update, autocast_loss


class FitCritic(KitHook):
    """Fits the critic to each batch with a separate optimiser, before advantages are computed.

    Value targets are computed once per batch with the current critic. The critic is then trained on
    these targets for ``epochs`` passes over shuffled minibatches. As in pyrado, the policy's
    advantages are computed with the fitted critic. The plan and ledger count only the policy's
    gradient steps. The critic's gradient steps are logged as ``critic/gradient_steps``.

    Args:
        critic: module that maps observations to ``state_value``.
        epochs: passes over each batch.
        minibatch_size: transitions per minibatch. The last minibatch of a pass may be smaller.
        learning_rate: learning rate of Adam.
        loss: distance between values and targets: ``l2``, ``l1`` or ``smooth_l1``.
        max_grad_norm: maximum gradient norm; ``None`` disables clipping.
        compile: execution mode, as in :class:`~kit.update.Update`.
        precision: dtype for matrix products in the loss: ``float32`` or ``bfloat16``.
        **horizon: ``gamma``, ``lmbda`` or ``n_step``, as in :class:`~kit.advantages.GAE`.

    Raises:
        SettingError: if the critic is recurrent, or ``epochs`` or ``minibatch_size`` is below 1.
    """

    kind: Kind = "step"
    operations: ClassVar = {
        "pre_steps_log": "take", "pre_optim_steps": "fit", "post_steps_log": "log",
    }  # fmt: skip

    def __init__(
        self,
        critic: Any,
        *,
        epochs: int,
        minibatch_size: int = 64,
        learning_rate: float = 1e-3,
        loss: str = "l2",
        max_grad_norm: float | None = None,
        compile: Compile = "auto",
        precision: str = "float32",
        **horizon: Any,
    ) -> None:
        if "is_init" in critic.in_keys:
            raise SettingError(
                "critic",
                type(critic).__name__,
                "is recurrent, but only a feedforward critic can be fitted separately",
                "use critic_epochs=0 to fit the critic jointly with the policy",
            )
        self.epochs = whole_number("critic_epochs", epochs, at_least=1)
        self.minibatch_size = whole_number("critic_minibatch_size", minibatch_size, at_least=1)
        self.targets = GAE(value_network=critic, **horizon)
        self.keys = [*critic.in_keys, "value_target"]
        optimizer = Adam(critic.parameters(), lr=learning_rate, fused=True)
        device = next(critic.parameters()).device
        loss_module = autocast_loss(_ValueLoss(critic, loss), precision, device)
        self.update = Update(loss_module, optimizer, max_grad_norm=max_grad_norm, compile=compile)
        self.gradient_steps = 0
        self._metrics: dict[str, Any] = {}
        self._batches: list[TensorDictBase] = []

    def take(self, batch: TensorDictBase) -> None:
        """Store an iteration's batch ``[num_envs, steps]`` with the changes made by other hooks.

        A prefill batch that the policy trains on is concatenated with the first batch.
        """
        prefilled = self._batches and self.trainer.ledger.iterations == 0
        joined = prefilled and self.trainer.plan.prefill_in_first_batch
        self._batches = [*self._batches, batch] if joined else [batch]

    @torch.no_grad()
    def fit(self) -> None:
        """Fit the critic to the stored batch without modifying the batch.

        Only the newest batch is used, so random prefill batches are skipped unless the policy
        trains on them.
        """
        (batch, *more), self._batches = self._batches, []
        batch = torch.cat([batch, *more], dim=-1) if more else batch.copy()
        rows, means = valid_rows(self.targets(batch), self.keys), MetricMeans()
        for _ in range(self.epochs):
            order = torch.randperm(len(rows), device=rows.device)
            for index in torch.split(order, self.minibatch_size):
                means.add(self.update(rows[index]))
                self.gradient_steps += 1
        self._metrics = means.peek()

    def log(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss for the last batch and the critic's total gradient steps so far."""
        losses = {f"critic/{name.removesuffix('_critic')}": v for name, v in self._metrics.items()}
        return {**losses, "critic/gradient_steps": self.gradient_steps}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser state and step count. The policy's loss module saves the weights."""
        return {"update": self.update.state_dict(), "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.update.load_state_dict(state_dict["update"])
        self.gradient_steps = int(state_dict["gradient_steps"])


def fit_critic(critic: Any, cfg: FittedCriticConfig, **horizon: Any) -> list[KitHook]:
    """Return the critic hooks for a config: none if ``critic_epochs`` is 0.

    ``horizon`` contains further arguments for :class:`~kit.advantages.GAE`.
    """
    if not cfg.critic_epochs:
        return []
    norm = cfg.max_grad_norm if cfg.critic_max_grad_norm == "same" else cfg.critic_max_grad_norm
    fit = FitCritic(
        critic, epochs=cfg.critic_epochs, minibatch_size=cfg.critic_minibatch_size,
        learning_rate=cfg.critic_learning_rate, loss=cfg.critic_loss, compile=cfg.compile,
        max_grad_norm=norm, precision=cfg.precision, gamma=cfg.gamma,
        lmbda=cfg.gae_lambda, **horizon,
    )  # fmt: skip
    if cfg.critic_lr_schedule == "constant":
        return [fit]
    (optimizer,) = fit.update.optimizers.values()
    rate = AnnealLearningRate(optimizer, cfg.critic_lr_schedule, name="critic_learning_rate")
    return [fit, rate]


class _ValueLoss(nn.Module):
    """Mean distance between state values and value targets."""

    def __init__(self, critic: nn.Module, distance: str) -> None:
        super().__init__()
        self.critic, self.distance = critic, distance

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        """Return the loss as ``loss_critic``."""
        value = self.critic(minibatch.exclude("value_target")).get("state_value")
        distances = distance_loss(value, minibatch.get("value_target"), self.distance)
        return TensorDict({"loss_critic": distances.mean()})
