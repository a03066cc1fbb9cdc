"""The vocabulary of neural-interactive-proofs (https://github.com/SamAdamDay/neural-interactive-proofs).

Its unit is the frame, the policy step here. ``Nip`` has every field of ``RlTrainerParameters``, in
its order and with its defaults, and the manner of its parameter classes: ``to_dict``,
``from_dict``, ``get`` and ``construct_test_params``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from kit.dialects.base import ON_POLICY, WrappedDialect
from kit.dialects.fields import acts, counts, fact, linear_or_constant, range_or_none, refused
from kit.steps.errors import SettingError, check_fields, real_number
from kit.steps.given import GivenFields
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt


def _one_factor(value: Any, settings: Any) -> float:
    """The factor of the hidden layers, which actor and critic share."""
    factors = settings.body_lr_factor
    if factors.actor != factors.critic:
        why = f"differs from body_lr_factor.critic={factors.critic}: here they have one factor"
        raise SettingError("body_lr_factor.actor", factors.actor, why, [factors.critic])
    return float(value)


def _clip_value(value: Any, settings: Any) -> Any:
    """The clip range of the value; the code takes 1 for ``True`` and 0 for ``False``."""
    return range_or_none(bool(value) if value in (0, 1) else value, settings)


# The parameters of PPO are those of another class there, `CommonPpoParameters`, at their defaults.
_PPO: dict[str, Any] = {
    "env.normalize_reward": False, "clip_epsilon": 0.2, "critic_coeff": 1.0,
    "entropy_coeff": 0.001, "normalize_advantage": True, "target_kl": None,
    "clip_schedule": "constant", "entropy_schedule": "constant",
}  # fmt: skip
_UNSAID: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vanilla_ppo", "ppo"), _PPO),
    **{name: {"env.normalize_reward": False} for name in ("spg", "reinforce")},
}


@dataclass
class LrFactors(GivenFields):
    """Factors of the learning rate."""

    actor: float = acts("body_lr_factor", 1.0, _one_factor)
    """factor of the actor's learning rate."""
    critic: float = acts("body_lr_factor", 1.0, _one_factor)
    """factor of the critic's learning rate."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the name of the class under ``_type``."""
        return {"actor": self.actor, "critic": self.critic, "_type": "LrFactors"}


@dataclass
class Nip(WrappedDialect):
    """``RlTrainerParameters`` of neural-interactive-proofs, field by field."""

    NAME = "nip"
    LIBRARY = "nip"
    VERSIONS: ClassVar = {
        "ccb3561": "the code of ccb3561 with torchrl 0.4.0; an epoch is as many minibatches as are "
        "full, and the smaller one opens the next epoch",
    }
    ALGORITHMS: ClassVar = dict.fromkeys(("vanilla_ppo", "spg", "reinforce", "ppo"), ON_POLICY)
    CANNOT: ClassVar = {
        "world_size": (1, "it is one process"),
        "collects_episodes": (False, "an iteration is a number of frames"),
        "on_policy": (True, "all its trainers are on-policy"),
    }
    GROUPS: ClassVar = {"body_lr_factor": LrFactors}
    IMPLICIT_DEFAULTS: ClassVar = _UNSAID
    SECTIONS = frozenset({"", "rl", "protocol_common"})
    PATHS: ClassVar = {"trainer": "algo"}

    frames_per_batch: PositiveInt | None = 1000
    """frames of one iteration, over all environments; ``None``: ``rollouts_per_iteration *
    steps_per_env_per_iteration``."""
    rollouts_per_iteration: PositiveInt | None = None
    """rollouts of one iteration, if ``frames_per_batch`` is ``None``; ``None``: as many as the
    dataset has points."""
    steps_per_env_per_iteration: PositiveInt | None = None
    """frames of each environment in one iteration, a factor of ``frames_per_batch``, which makes
    the number of environments; ``None``: ``max_message_rounds``."""
    num_iterations: NonNegativeInt = 1000
    """iterations; ``num_iterations * frames_per_batch`` frames in total."""
    num_epochs: NonNegativeInt = 4
    """update epochs of one iteration."""
    minibatch_size: PositiveInt = counts("minibatch_size", 64)
    """frames in a minibatch."""
    lr: float = acts("learning_rate", 0.003)
    """learning rate."""
    anneal_lr: bool = acts("lr_schedule", False, linear_or_constant)
    """whether the learning rate falls linearly, to ``lr / num_iterations`` in the last one."""
    max_grad_norm: float = acts("max_grad_norm", 1.0)
    """largest norm of the gradients."""
    loss_critic_type: Literal["l1", "l2", "smooth_l1"] = acts("critic_loss", "smooth_l1")
    """loss of the critic: ``l1``, ``l2`` or ``smooth_l1``."""
    clip_value: float | bool | None = acts("clip_value", False, _clip_value)
    """clip range of the value; ``True``: that of the policy; ``False`` or ``None``: none. The code
    takes 1 for ``True`` and 0 for ``False``."""
    normalize_observations: bool = acts("env.normalize_observation", True)
    """whether observations are normalised, with statistics of random actions before training."""
    num_normalization_steps: NonNegativeInt = refused(
        "use steps.num_normalization_steps of the kit, where it is part of the total", 1000
    )
    """frames for these statistics: for each key, and in the train and the test environments."""
    gamma: float = acts("gamma", 0.9)
    """discount factor per step."""
    lmbda: float = acts("gae_lambda", 0.95)
    """trade-off of the generalised advantage estimate between bias (0) and variance (1)."""
    body_lr_factor: LrFactors = None  # type: ignore[assignment]  # filled in
    """factors of the learning rate of the body: ``LrFactors``, or a dict of its settings."""
    use_shared_body: bool = acts("shared_backbone", True)
    """whether actor and critic share a body."""
    num_test_iterations: NonNegativeInt = 10
    """batches of the test, once after training, each of ``frames_per_batch`` frames."""
    max_message_rounds: PositiveInt | None = fact()
    """greatest length of an episode (``protocol.max_message_rounds``), in frames."""
    min_message_rounds: NonNegativeInt = fact(default=0)
    """least length of an episode, in frames."""
    dataset_size: PositiveInt | None = fact()
    """points in the training dataset."""
    test_dataset_size: PositiveInt | None = fact()
    """points in the test dataset."""
    num_normalization_keys: PositiveInt = fact(default=2)
    """observation keys that are normalised: 3 with a linear message space, else 2."""
    test_run: bool = fact(default=False)
    """whether every loop ends after one pass: one iteration, one minibatch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.body_lr_factor is None or isinstance(self.body_lr_factor, Mapping):
            factors = _settings(LrFactors, self.body_lr_factor or {}, "body_lr_factor.")
            self.body_lr_factor = LrFactors(**factors)

    # ------------------------------------------------------------------ what follows from them
    def steps_of_each(self) -> int:
        """Frames of each environment in one iteration.

        Raises:
            SettingError: if they do not divide ``frames_per_batch``.
        """
        steps = self.steps_per_env_per_iteration or self.max_message_rounds
        if steps is None:
            why = "stands for max_message_rounds, which is not known"
            raise SettingError("steps_per_env_per_iteration", None, why, "give one of them")
        frames = self.frames_per_batch or 0
        if frames % steps:
            whole = max(frames // steps, 1)
            why = f"is not a multiple of the {steps} frames of each environment"
            works = [whole * steps, (whole + 1) * steps]
            raise SettingError("frames_per_batch", frames, why, works)
        return steps

    def frames(self, dataset_size: int | None) -> int:
        """Frames of one iteration with a dataset of so many points."""
        if self.frames_per_batch is not None:
            return self.frames_per_batch
        rollouts = self.rollouts_per_iteration or dataset_size
        if rollouts is None:
            why = "stands for the size of the dataset, which is not known"
            works = "give it, frames_per_batch or dataset_size"
            raise SettingError("rollouts_per_iteration", None, why, works)
        return rollouts * self.steps_of_each()

    def test_rollouts(self) -> int:
        """Rollouts of the test after training: one of each environment in each test batch."""
        size = self.test_dataset_size or self.dataset_size
        batches = min(self.num_test_iterations, 1) if self.test_run else self.num_test_iterations
        return batches * (self.frames(size) // self.steps_of_each())

    def normalization_frames(self, num_envs: int, episode_length: int) -> tuple[int, int]:
        """Batched steps and frames that normalisation takes in one of two environments.

        For each key rollouts of all environments are made, each until the first episode ends,
        until there are ``num_normalization_steps`` frames.
        """
        if not self.normalize_observations:
            return 0, 0
        wanted = 10 if self.test_run else self.num_normalization_steps
        steps = min(wanted, episode_length)
        rollouts = -(-wanted // (steps * num_envs)) if wanted else 0
        batched = self.num_normalization_keys * rollouts * steps
        return batched, batched * num_envs

    def learning_rate(self, iteration: int) -> float:
        """Learning rate of ``iteration`` (from 1)."""
        share = 1 - (iteration - 1) / self.num_iterations if self.anneal_lr else 1.0
        return real_number("lr", self.lr) * share

    # ------------------------------------------------------------------ counts and caveats
    def _plan(self) -> dict[str, Any]:
        steps = self.steps_of_each()
        frames = self.frames(self.dataset_size)
        self._check(steps)
        tests = self.test_rollouts()
        return {
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
            why = (
                f"is less than the {self.min_message_rounds} rounds of an episode, and nip fails "
                "in an iteration without a finished one"
            )
            raise SettingError("steps_per_env_per_iteration", steps, why, [rounds])
        if self.algo == "reinforce":
            why = "fails in nip: its reward-to-go finds no end of an episode"
            raise SettingError("algo", "reinforce", why, ["vanilla_ppo", "spg"])

    @staticmethod
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        evaluates = plan.evaluations_after(plan.iterations) > 0
        batches, left = divmod(plan.evaluation_episodes, plan.num_envs)
        single = plan.minibatches_per_epoch == 1 and (plan.update_epochs or 0) <= 1
        frames: dict[str, Any] = {"frames_per_batch": plan.frames_per_batch}
        if evaluates and (left or (single and batches > 1)):
            # One batch of all points of another dataset has as many episodes as are wanted.
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
        yield f"{envs} environments follow from {frames} frames of {each} each."
        if self.frames_per_batch is not None and self.rollouts_per_iteration is not None:
            yield "rollouts_per_iteration is ignored where frames_per_batch is given."
        if frames % size and plan.last_minibatch == "carry":
            yield (
                f"An epoch is {frames // size} minibatches, not a pass: the smaller one of "
                f"{frames % size} opens the next epoch, and later epochs straddle two permutations."
            )
        if self.body_lr_factor is not None:
            yield "body_lr_factor acts here; nip's agents have factors of their own."
        rounds = self.max_message_rounds
        if self.normalize_observations:
            yield (
                "Statistics of observations are fixed before training; those of recipes go on, up "
                "to num_normalization_steps of the kit if that is given."
            )
        if rounds is not None and self.normalize_observations:
            batched, total = self.normalization_frames(plan.num_envs, rounds)
            yield (
                f"num_normalization_steps={self.num_normalization_steps} is a minimum for each of "
                f"{self.num_normalization_keys} keys in each of two environments: {total:,} frames "
                f"of {batched:,} steps in each, if every episode lasts {rounds} rounds."
            )
        if self.anneal_lr:
            yield "anneal_lr ends at lr / num_iterations in the last iteration, not at 0."
        if not self.num_test_iterations:
            yield "num_test_iterations=0 trains as planned; nip fails afterwards, in its test."
        elif self.num_test_iterations:
            yield (
                f"The test comes once, after training, and still samples its actions: "
                f"{self.num_test_iterations} batches of {frames} frames, not whole episodes."
            )

    # ------------------------------------------------------------------ nip's own manner
    def to_dict(self) -> dict[str, Any]:
        """The parameters as plain values, with the name of the class under ``_type``."""
        made = {f.name: getattr(self, f.name) for f in fields(self) if not f.kw_only}
        if isinstance(self.body_lr_factor, LrFactors):
            made["body_lr_factor"] = self.body_lr_factor.to_dict()
        return made | {"_type": "RlTrainerParameters"}

    @classmethod
    def from_dict(cls, params_dict: Mapping[str, Any], ignore_extra_keys: bool = False) -> Self:
        """The parameters of a dictionary that :meth:`to_dict` made.

        Args:
            params_dict: parameters by name.
            ignore_extra_keys: whether names that are no parameter are left out.

        Raises:
            SettingError: if a name is no parameter, or ``_type`` another class.
        """
        return cls(**_settings(cls, params_dict, ignore_extra_keys=ignore_extra_keys))

    def get(self, address: str) -> Any:
        """The value at a dotted address, such as ``body_lr_factor.actor``.

        Raises:
            KeyError: if there is nothing at the address.
        """
        value: Any = self
        for name in address.split("."):
            if name not in getattr(value, "__dataclass_fields__", ()):
                raise KeyError(f"Nothing is at the address {address!r}.")
            value = getattr(value, name)
        return value

    @classmethod
    def construct_test_params(cls) -> Self:
        """Small parameters for a test: one iteration of two environments."""
        return cls(
            frames_per_batch=16,
            steps_per_env_per_iteration=8,
            num_iterations=1,
            num_epochs=1,
            minibatch_size=16,
            num_normalization_steps=10,
            num_test_iterations=1,
        )


def _settings(
    cls: type, values: Mapping[str, Any], prefix: str = "", ignore_extra_keys: bool = False
) -> dict[str, Any]:
    """The settings in a dictionary that may name the type of its parameter class."""
    settings = dict(values)
    for extra in ("_type", "_package_version", "_package_name"):
        settings.pop(extra, None)
    if ignore_extra_keys:
        known = {f.name for f in fields(cls)}
        return {name: value for name, value in settings.items() if name in known}
    check_fields(settings, cls, "is no parameter", prefix)
    return settings


RlTrainerParameters = Nip
