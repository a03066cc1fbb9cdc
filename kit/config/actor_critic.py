"""The settings that on-policy recipes share: networks, advantages, optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kit.config.limits import (
    Count,
    HiddenSizes,
    LogStd,
    Natural,
    NotNegative,
    Positive,
    ScheduleName,
    UnitInterval,
)
from kit.config.settings import OnPolicyConfig
from kit.steps import SettingError


@dataclass
class ActorCriticConfig(OnPolicyConfig):
    """What every recipe with an actor and a critic has."""

    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of actor and critic."""
    activation: str = "tanh"
    """Activation: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    shared_body: bool = False
    """Whether actor and critic share their hidden layers."""
    initial_log_std: LogStd = 0.0
    """Initial log standard deviation of the Gaussian policy."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus."""
    anneal_entropy: ScheduleName = "constant"
    """Schedule of that weight; the same choices as anneal."""
    critic_coeff: NotNegative = 0.5
    """Weight of the value loss."""
    anneal_critic: ScheduleName = "constant"
    """Schedule of that weight; the same choices as anneal."""
    critic_loss: Literal["l2", "l1", "smooth_l1"] = "l2"
    """Distance between value and return: squared, absolute, or both (Huber)."""
    gae_lambda: UnitInterval = 0.95
    """Lambda of generalised advantage estimation; 1: returns with a bootstrapped end."""
    normalize_advantage: bool = True
    """Whether advantages are normalised to mean 0 and deviation 1."""
    normalize_over: Literal["minibatch", "batch", "running"] = "minibatch"
    """Rows over which they are normalised: each minibatch, each batch, or all batches so far."""
    learning_rate: Positive = 1e-3
    """Initial learning rate."""
    body_lr_factor: Positive = 1.0
    """Factor of the learning rate of the hidden layers; the output layers have it as it is."""
    anneal: ScheduleName = "linear"
    """Schedule of the learning rate, down to 0: linear, cosine or constant; "warmup 0.1 cosine"
    rises from 0 in a tenth of the run; "piecewise 0.5 0.1" is a tenth from half of the run on."""
    max_grad_norm: Positive | None = 0.5
    """Maximum norm of the gradient; null: unclipped."""

    @property
    def networks(self) -> dict[str, Any]:
        """Arguments of :func:`~kit.modules.make_actor_critic`."""
        names = ("hidden_sizes", "activation", "shared_body", "initial_log_std", "device")
        return {name: getattr(self, name) for name in names}

    @property
    def normalize_minibatch(self) -> bool:
        """Whether the loss normalises advantages."""
        return self.normalize_advantage and self.normalize_over == "minibatch"

    @property
    def standardize(self) -> Literal["batch", "running"] | None:
        """Rows over which the estimator standardises advantages; ``None``: it does not."""
        if not self.normalize_advantage or self.normalize_over == "minibatch":
            return None
        return self.normalize_over

    @property
    def horizon(self) -> dict[str, Any]:
        """Arguments of :class:`~kit.advantages.GAE`."""
        weights = {"gamma": self.gamma, "lmbda": self.gae_lambda}
        return {**weights, "standardize": self.standardize}

    @property
    def schedules(self) -> dict[str, str]:
        """Schedules of the loss's weights, for :func:`~kit.hooks.anneal_coefficients`."""
        return {"entropy_coeff": self.anneal_entropy, "critic_coeff": self.anneal_critic}


@dataclass
class FittedCriticConfig(ActorCriticConfig):
    """What recipes have whose critic may be fitted on its own."""

    critic_epochs: Natural = 0
    """Passes over each batch in which an optimiser of its own fits the critic, before advantages
    are estimated; 0: it learns with the policy, by the weight critic_coeff."""
    critic_minibatch_size: Count = 64
    """Transitions in a minibatch of these passes."""
    critic_learning_rate: Positive = 1e-3
    """Learning rate of these passes."""

    @property
    def joint_critic_coeff(self) -> float | None:
        """Weight of the value loss among the policy's; ``None``: the critic is fitted alone.

        Raises:
            SettingError: if a setting is given that means nothing for the way it learns.
        """
        together = ("critic_coeff", "anneal_critic", "shared_body")
        alone = ("critic_minibatch_size", "critic_learning_rate")
        usual = type(self)()
        for name in together if self.critic_epochs else alone:
            given, works = getattr(self, name), getattr(usual, name)
            if given != works:
                why = f"means nothing with critic_epochs={self.critic_epochs}"
                raise SettingError(name, given, why, [works])
        return None if self.critic_epochs else self.critic_coeff
