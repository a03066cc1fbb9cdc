"""Settings for nip (https://github.com/SamAdamDay/neural-interactive-proofs).

nip counts frames, which are policy steps. ``Nip`` has the same fields and defaults as nip's
``RlTrainerParameters``, and the methods ``to_dict``, ``from_dict``, ``get`` and
``construct_test_params``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from kit.dialects.base import ON_POLICY, WrappedDialect
from kit.dialects.fields import (
    MapsTo,
    count_field,
    extra_field,
    linear_or_constant,
    mapped,
    range_or_none,
)
from kit.steps.errors import SettingError, check_fields, real_number
from kit.steps.given import GivenFields
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt


def _critic_factor(value: Any, settings: Any) -> float | None:
    """Return the critic's factor for hidden layers, or ``None`` if it equals the actor's factor."""
    factors = settings.body_lr_factor
    return None if factors.critic == factors.actor else float(factors.critic)


def _clip_value(value: Any, settings: Any) -> Any:
    """Return the value clip range. nip does not distinguish ``True`` from 1 or ``False`` from 0."""
    return range_or_none(bool(value) if value in (0, 1) else value, settings)


# Defaults from nip's `CommonPpoParameters`.
_PPO: dict[str, Any] = {
    "env.normalize_reward": False, "clip_epsilon": 0.2, "critic_coeff": 1.0,
    "entropy_coeff": 0.001, "normalize_advantage": True, "target_kl": None,
    "clip_schedule": "constant", "entropy_schedule": "constant",
}  # fmt: skip
_IMPLICIT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vanilla_ppo", "ppo"), _PPO),
    **{name: {"env.normalize_reward": False} for name in ("spg", "reinforce")},
}


@dataclass
class LrFactors(GivenFields):
    """Learning-rate factors for actor and critic."""

    actor: float = mapped(
        "backbone_lr_scale", 1.0, also=MapsTo("critic_backbone_lr_scale", _critic_factor)
    )
    """Factor for the actor's learning rate."""
    critic: float = mapped("critic_backbone_lr_scale", 1.0, _critic_factor)
    """Factor for the critic's learning rate."""

    @classmethod
    def _get_param_class_from_dict(cls, param_dict: Mapping[str, Any]) -> type | None:
        """Return the parameter class named under ``_type``; see :func:`_parameter_class`."""
        return _parameter_class(param_dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain values, with the class name under ``_type``."""
        return {"actor": self.actor, "critic": self.critic, "_type": "LrFactors"}


@dataclass
class Nip(WrappedDialect):
    """Equivalent of nip's ``RlTrainerParameters``, with the same fields and defaults."""

    NAME = "nip"
    LIBRARY = "nip"
    VERSIONS: ClassVar = {
        "ccb3561": "code of ccb3561 with torchrl 0.4.0; an epoch has only full minibatches, and "
        "the remainder is the first minibatch of the next epoch",
    }
    ALGORITHMS: ClassVar = dict.fromkeys(("vanilla_ppo", "spg", "reinforce", "ppo"), ON_POLICY)
    CANNOT: ClassVar = {
        "world_size": (1, "nip runs in a single process"),
        "collects_episodes": (False, "nip collects a fixed number of frames per iteration"),
        "on_policy": (True, "all trainers of nip are on-policy"),
    }
    GROUPS: ClassVar = {"body_lr_factor": LrFactors}
    IMPLICIT_DEFAULTS: ClassVar = _IMPLICIT
    SECTIONS = frozenset({"", "rl", "protocol_common"})
    PATHS: ClassVar = {"trainer": "algo"}

    frames_per_batch: PositiveInt | None = 1000
    """Frames per iteration in all environments; if ``None``, computed from the rollouts."""
    rollouts_per_iteration: PositiveInt | None = None
    """Rollouts per iteration if ``frames_per_batch`` is ``None``; defaults to the dataset size."""
    steps_per_env_per_iteration: PositiveInt | None = None
    """Frames per environment and iteration; defaults to ``max_message_rounds``."""
    num_iterations: NonNegativeInt = 1000
    """Number of iterations. The run has ``num_iterations * frames_per_batch`` frames."""
    num_epochs: NonNegativeInt = 4
    """Update epochs per iteration."""
    minibatch_size: PositiveInt = count_field("minibatch_size", 64)
    """Frames per minibatch."""
    lr: float = mapped("learning_rate", 0.003)
    """Learning rate."""
    anneal_lr: bool = mapped("lr_schedule", False, linear_or_constant)
    """Whether the learning rate decreases linearly to ``lr / num_iterations``."""
    max_grad_norm: float = mapped("max_grad_norm", 1.0)
    """Maximum gradient norm."""
    loss_critic_type: Literal["l1", "l2", "smooth_l1"] = mapped("critic_loss", "smooth_l1")
    """Critic loss: ``l1``, ``l2`` or ``smooth_l1``."""
    clip_value: float | bool | None = mapped("clip_value", False, _clip_value)
    """Value clip range. ``True`` is the policy's range; ``False`` or ``None`` disables clipping."""
    normalize_observations: bool = mapped("env.normalize_observation", True)
    """Whether to normalise observations with statistics collected by random actions in advance."""
    num_normalization_steps: NonNegativeInt = 1000
    """Frames used to normalise each observation key, both in training and in test environments.
    They are collected before the run and are not part of the total."""
    gamma: float = mapped("gamma", 0.9)
    """Discount factor per step."""
    lmbda: float = mapped("gae_lambda", 0.95)
    """Lambda for generalised advantage estimation, from 0 (most bias) to 1 (most variance)."""
    body_lr_factor: LrFactors = None  # type: ignore[assignment]  # set in __post_init__
    """Learning-rate factors for the backbone: ``LrFactors``, or a mapping with its fields."""
    use_shared_body: bool = mapped("shared_backbone", True)
    """Whether actor and critic share a backbone."""
    num_test_iterations: NonNegativeInt = 10
    """Number of batches of ``frames_per_batch`` frames in the test after training."""
    max_message_rounds: PositiveInt | None = extra_field()
    """Maximum episode length in frames (``protocol.max_message_rounds``)."""
    min_message_rounds: NonNegativeInt = extra_field(default=0)
    """Minimum episode length in frames."""
    dataset_size: PositiveInt | None = extra_field()
    """Size of the training dataset."""
    test_dataset_size: PositiveInt | None = extra_field()
    """Size of the test dataset."""
    num_normalization_keys: PositiveInt = extra_field(default=2)
    """Number of normalised observation keys: 3 with a linear message space, otherwise 2."""
    test_run: bool = extra_field(default=False)
    """Whether every loop stops after one pass, so a run has one iteration with one minibatch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.body_lr_factor is None or isinstance(self.body_lr_factor, Mapping):
            factors = _settings(LrFactors, self.body_lr_factor or {}, "body_lr_factor.")
            self.body_lr_factor = LrFactors(**factors)

    # ------------------------------------------------------------------ derived counts
    def steps_of_each(self) -> int:
        """Return the number of frames per environment and iteration.

        Raises:
            SettingError: if this number is unknown or does not divide ``frames_per_batch``.
        """
        steps = self.steps_per_env_per_iteration or self.max_message_rounds
        if steps is None:
            reason = "The default is max_message_rounds, which is not set"
            hint = "Set steps_per_env_per_iteration or max_message_rounds"
            raise SettingError("steps_per_env_per_iteration", None, reason, hint)
        frames = self.frames_per_batch or 0
        if frames % steps:
            envs = max(frames // steps, 1)
            reason = f"The value must be a multiple of {steps}, the frames per environment"
            multiples = [envs * steps, (envs + 1) * steps]
            raise SettingError("frames_per_batch", frames, reason, multiples)
        return steps

    def frames(self, dataset_size: int | None) -> int:
        """Return the number of frames per iteration for a given dataset size."""
        if self.frames_per_batch is not None:
            return self.frames_per_batch
        rollouts = self.rollouts_per_iteration or dataset_size
        if rollouts is None:
            reason = "The default is dataset_size, which is not set"
            hint = "Set rollouts_per_iteration, frames_per_batch or dataset_size"
            raise SettingError("rollouts_per_iteration", None, reason, hint)
        return rollouts * self.steps_of_each()

    def test_rollouts(self) -> int:
        """Return the number of rollouts in the test, one per environment and test batch."""
        size = self.test_dataset_size or self.dataset_size
        batches = min(self.num_test_iterations, 1) if self.test_run else self.num_test_iterations
        return batches * (self.frames(size) // self.steps_of_each())

    def normalization_frames(self, num_envs: int, episode_length: int) -> tuple[int, int]:
        """Return the number of vector steps and frames used to normalise training environments.

        For each key, all environments are rolled out until the first episode ends. This is repeated
        until ``num_normalization_steps`` frames are reached.
        """
        if not self.normalize_observations:
            return 0, 0
        wanted = 10 if self.test_run else self.num_normalization_steps
        steps = min(wanted, episode_length)
        rollouts = -(-wanted // (steps * num_envs)) if wanted else 0
        batched = self.num_normalization_keys * rollouts * steps
        return batched, batched * num_envs

    def learning_rate(self, iteration: int) -> float:
        """Return the learning rate in ``iteration``, counted from 1."""
        scale = 1 - (iteration - 1) / self.num_iterations if self.anneal_lr else 1.0
        return real_number("lr", self.lr) * scale

    # ------------------------------------------------------------------ counts and caveats
    def _plan(self) -> dict[str, Any]:
        steps = self.steps_of_each()
        frames = self.frames(self.dataset_size)
        self._check(steps)
        tests, rounds = self.test_rollouts(), self.max_message_rounds or steps
        return {
            "normalization_steps": self.normalization_frames(frames // steps, rounds)[1],
            "iterations": min(self.num_iterations, 1) if self.test_run else self.num_iterations,
            "num_envs": frames // steps,
            "steps_per_env": steps,
            "update_epochs": min(self.num_epochs, 1) if self.test_run else self.num_epochs,
            "minibatches_per_epoch": 1 if self.test_run else None,
            "last_minibatch": "carry",
            "final_evaluation": tests > 0,
            "evaluation_episodes": max(tests, 1),
        }

    def _check(self, steps: int) -> None:
        rounds = self.max_message_rounds
        if rounds is not None and steps < max(self.min_message_rounds, 1):
            reason = (
                f"Episodes have at least {self.min_message_rounds} rounds, and nip fails in an "
                "iteration without a complete episode"
            )
            raise SettingError("steps_per_env_per_iteration", steps, reason, [rounds])
        if self.algo == "reinforce":
            reason = "nip's REINFORCE fails, because its reward-to-go finds no episode end"
            raise SettingError("algo", "reinforce", reason, ["vanilla_ppo", "spg"])

    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        evaluates = plan.evaluations_after(plan.iterations) > 0
        batches, left = divmod(plan.evaluation_episodes, plan.num_envs)
        single = plan.minibatches_per_epoch == 1 and (plan.update_epochs or 0) <= 1
        frames: dict[str, Any] = {"frames_per_batch": plan.frames_per_batch}
        if evaluates and (left or (single and batches > 1)):
            # A test batch has one episode for each item in the test dataset.
            frames = {"frames_per_batch": None, "dataset_size": plan.num_envs}
            frames["test_dataset_size"] = plan.evaluation_episodes
            batches = 1
        return {
            **frames,
            "steps_per_env_per_iteration": plan.steps_per_env,
            "num_iterations": plan.iterations,
            "num_epochs": plan.update_epochs or 0,
            "minibatch_size": plan.minibatch_size or plan.frames_per_batch,
            "num_test_iterations": batches if evaluates else 0,
            "test_run": single,
        }

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        frames, size = plan.frames_per_batch, self.minibatch_size
        envs, each = plan.num_envs, plan.steps_per_env
        yield f"{frames} frames with {each} per environment result in {envs} environments."
        if self.frames_per_batch is not None and self.rollouts_per_iteration is not None:
            yield "rollouts_per_iteration is ignored if frames_per_batch is given."
        if frames % size and plan.last_minibatch == "carry":
            yield (
                f"An epoch has {frames // size} full minibatches instead of a whole pass. The "
                f"remaining {frames % size} frames start the next epoch, so later epochs mix two "
                "permutations."
            )
        if self.body_lr_factor is not None:
            yield "body_lr_factor applies to the recipe; in nip each agent has separate factors."
        rounds = self.max_message_rounds
        if rounds is not None and self.normalize_observations:
            batched, total = self.normalization_frames(plan.num_envs, rounds)
            yield (
                f"num_normalization_steps={self.num_normalization_steps} is a minimum per key and "
                f"environment. With {self.num_normalization_keys} keys and episodes of {rounds} "
                f"rounds, each of two environments has {total:,} frames in {batched:,} steps."
            )
        if self.anneal_lr:
            yield "anneal_lr ends at lr / num_iterations in the last iteration, not at 0."
        if not self.num_test_iterations:
            yield "num_test_iterations=0 trains as planned, but nip fails in the test afterwards."
        elif self.num_test_iterations:
            yield (
                f"The test runs once after training with sampled actions. It has "
                f"{self.num_test_iterations} batches of {frames} frames instead of whole episodes."
            )

    # ------------------------------------------------------------------ nip's parameter API
    def to_dict(self) -> dict[str, Any]:
        """Return the parameters as a dict of plain values, with the class name under ``_type``."""
        params = {f.name: getattr(self, f.name) for f in fields(self) if not f.kw_only}
        if isinstance(self.body_lr_factor, LrFactors):
            params["body_lr_factor"] = self.body_lr_factor.to_dict()
        return params | {"_type": "RlTrainerParameters"}

    @classmethod
    def _get_param_class_from_dict(cls, param_dict: Mapping[str, Any]) -> type | None:
        """Return the parameter class named under ``_type``; see :func:`_parameter_class`."""
        return _parameter_class(param_dict)

    @classmethod
    def from_dict(cls, params_dict: Mapping[str, Any], ignore_extra_keys: bool = False) -> Self:
        """Create the parameters from a dictionary returned by :meth:`to_dict`.

        Args:
            params_dict: parameter values, keyed by name.
            ignore_extra_keys: whether to ignore unknown names.

        Raises:
            SettingError: if a name is unknown.
        """
        return cls(**_settings(cls, params_dict, ignore_extra_keys=ignore_extra_keys))

    def get(self, address: str) -> Any:
        """Return the value at a dotted address, such as ``body_lr_factor.actor``.

        Raises:
            KeyError: if the address does not exist.
        """
        value: Any = self
        for name in address.split("."):
            if name not in getattr(value, "__dataclass_fields__", ()):
                raise KeyError(f"The address {address!r} does not exist.")
            value = getattr(value, name)
        return value

    @classmethod
    def construct_test_params(cls) -> Self:
        """Return parameters for a small test with one iteration in two environments."""
        return cls(
            frames_per_batch=16,
            steps_per_env_per_iteration=8,
            num_iterations=1,
            num_epochs=1,
            minibatch_size=16,
            num_normalization_steps=10,
            num_test_iterations=1,
        )


def _parameter_class(param_dict: Mapping[str, Any]) -> type | None:
    """Return the parameter class named under ``_type``, or ``None`` if there is no ``_type``.

    Raises:
        ValueError: if this is not the name of a parameter class.
    """
    name = param_dict.get("_type")
    classes: dict[Any, type] = {"RlTrainerParameters": Nip, "LrFactors": LrFactors}
    if name is not None and name not in classes:
        raise ValueError(f"{name!r} is not the name of a parameter class.")
    return classes.get(name)


def _settings(
    cls: type, values: Mapping[str, Any], prefix: str = "", ignore_extra_keys: bool = False
) -> dict[str, Any]:
    """Return a serialised object's settings, without the entries for type and package."""
    settings = dict(values)
    for extra in ("_type", "_package_version", "_package_name"):
        settings.pop(extra, None)
    if ignore_extra_keys:
        names = {f.name for f in fields(cls)}
        return {name: value for name, value in settings.items() if name in names}
    check_fields(settings, cls, f"{cls.__name__} has no such parameter", prefix)
    return settings


RlTrainerParameters = Nip
