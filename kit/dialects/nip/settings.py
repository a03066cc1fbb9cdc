"""The vocabulary of neural-interactive-proofs (https://github.com/SamAdamDay/neural-interactive-proofs).

Its unit is the frame, the policy step here. ``Nip`` has every field of ``RlTrainerParameters``, in
its order and with its defaults, and the manner of its parameter classes: ``to_dict``,
``from_dict``, ``get`` and ``construct_test_params``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from kit.dialects.base import ON_POLICY, Acts, Count, Dialect, Natural, Refused, linear_or_constant
from kit.steps.errors import SettingError, nearest_first, real_number


@dataclass
class LrFactors:
    """Factors of the learning rate."""

    actor: float = 1.0
    """factor of the actor's learning rate."""
    critic: float = 1.0
    """factor of the critic's learning rate."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the name of the class under ``_type``."""
        return {"actor": self.actor, "critic": self.critic, "_type": "LrFactors"}


@dataclass
class NipSettings(Dialect):
    """``RlTrainerParameters`` of neural-interactive-proofs, field by field."""

    NAME: ClassVar[str] = "nip"
    LIBRARY: ClassVar[str] = "nip"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "ccb3561": "the code of ccb3561 with torchrl 0.4.0; an epoch is as many minibatches as are "
        "full, and the smaller one opens the next epoch",
        "documented": "RlTrainerParameters as it reads: an epoch is a pass over all frames, and "
        "normalisation takes num_normalization_steps in total",
    }
    ALGORITHMS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("vanilla_ppo", "spg", "reinforce", "ppo"), ON_POLICY
    )
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {
        "max_message_rounds",
        "min_message_rounds",
        "dataset_size",
        "test_dataset_size",
        "num_normalization_keys",
        "test_run",
        "action_repeat",
        "max_episode_steps",
    }
    CARRIED: ClassVar[Mapping[str, Acts | Refused]] = {
        "lr": Acts("learning_rate"),
        "anneal_lr": Acts("anneal", linear_or_constant),
        "max_grad_norm": Acts("max_grad_norm"),
        "loss_critic_type": Acts("loss_critic_type"),
        "clip_value": Acts("clip_value", lambda value, _: None if value is False else value),
        "normalize_observations": Acts("env.normalize_observation"),
        "num_normalization_steps": Refused("here the statistics run along with training"),
        "gamma": Acts("gamma"),
        "lmbda": Acts("gae_lambda"),
        "body_lr_factor.actor": Refused("actor and critic have one learning rate"),
        "body_lr_factor.critic": Refused("actor and critic have one learning rate"),
        "use_shared_body": Acts("shared_body"),
    }

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "rl", "protocol_common"})
    PATHS: ClassVar[Mapping[str, str]] = {"trainer": "algo"}
    NESTED: ClassVar[frozenset[str]] = frozenset({"body_lr_factor"})

    frames_per_batch: Count | None = 1000
    """frames of one iteration, over all environments; ``None``: ``rollouts_per_iteration *
    steps_per_env_per_iteration``."""
    rollouts_per_iteration: Count | None = None
    """rollouts of one iteration, if ``frames_per_batch`` is ``None``; ``None``: as many as the
    dataset has points."""
    steps_per_env_per_iteration: Count | None = None
    """frames of each environment in one iteration, a factor of ``frames_per_batch``, which makes
    the number of environments; ``None``: ``max_message_rounds``."""
    num_iterations: Natural = 1000
    """iterations; ``num_iterations * frames_per_batch`` frames in total."""
    num_epochs: Natural = 4
    """update epochs of one iteration."""
    minibatch_size: Count = 64
    """frames in a minibatch."""
    lr: float = 0.003
    """learning rate."""
    anneal_lr: bool = False
    """whether the learning rate falls linearly, to ``lr / num_iterations`` in the last one."""
    max_grad_norm: float = 1.0
    """largest norm of the gradients."""
    loss_critic_type: str = "smooth_l1"
    """loss of the critic: ``l1``, ``l2`` or ``smooth_l1``."""
    clip_value: float | bool | None = False
    """clip range of the value; ``True``: that of the policy; ``False`` or ``None``: none."""
    normalize_observations: bool = True
    """whether observations are normalised, with statistics of random actions before training."""
    num_normalization_steps: Natural = 1000
    """frames for these statistics: for each key, and in the train and the test environments."""
    gamma: float = 0.9
    """discount factor per step."""
    lmbda: float = 0.95
    """trade-off of the generalised advantage estimate between bias (0) and variance (1)."""
    body_lr_factor: Any = None
    """factors of the learning rate of the body: ``LrFactors``, or a dict of its settings."""
    use_shared_body: bool = True
    """whether actor and critic share a body."""
    num_test_iterations: Natural = 10
    """batches of the test, once after training, each of ``frames_per_batch`` frames."""
    max_message_rounds: Count | None = field(default=None, kw_only=True)
    """greatest length of an episode (``protocol.max_message_rounds``), in frames."""
    min_message_rounds: Natural = field(default=0, kw_only=True)
    """least length of an episode, in frames."""
    dataset_size: Count | None = field(default=None, kw_only=True)
    """points in the training dataset."""
    test_dataset_size: Count | None = field(default=None, kw_only=True)
    """points in the test dataset."""
    num_normalization_keys: Count = field(default=2, kw_only=True)
    """observation keys that are normalised: 3 with a linear message space, else 2."""
    test_run: bool = field(default=False, kw_only=True)
    """whether every loop ends after one pass: one iteration, one minibatch."""
    action_repeat: Count = field(default=1, kw_only=True)
    """env steps one action is held for; the environment's business."""
    max_episode_steps: Count | None = field(default=None, kw_only=True)
    """policy steps after which the kit truncates an episode."""
    version: str = field(default="ccb3561", kw_only=True)
    """behaviour to reproduce; see ``VERSIONS``."""

    def __post_init__(self) -> None:
        if self.body_lr_factor is None:
            self.body_lr_factor = LrFactors()
        elif isinstance(self.body_lr_factor, dict):
            factors = _settings(LrFactors, self.body_lr_factor, "body_lr_factor.")
            self.body_lr_factor = LrFactors(**factors)

    def _guess(self) -> str:
        return "vanilla_ppo"

    # ------------------------------------------------------------------ what follows from them
    def steps_of_each(self) -> int:
        """Frames of each environment in one iteration.

        Raises:
            SettingError: if they do not divide ``frames_per_batch``.
        """
        steps = self.steps_per_env_per_iteration or self.max_message_rounds
        if steps is None:
            raise SettingError(
                "steps_per_env_per_iteration",
                None,
                "stands for max_message_rounds, which is not known",
                "give one of them",
            )
        frames = self.frames_per_batch
        given = frames if frames is not None else 0
        if given % steps:
            whole = max(given // steps, 1)
            raise SettingError(
                "frames_per_batch",
                given,
                f"is not a multiple of the {steps} frames of each environment",
                [whole * steps, (whole + 1) * steps],
            )
        return steps

    def frames(self, dataset_size: int | None) -> int:
        """Frames of one iteration with a dataset of so many points."""
        if self.frames_per_batch is not None:
            return self.frames_per_batch
        rollouts = self.rollouts_per_iteration or dataset_size
        if rollouts is None:
            raise SettingError(
                "rollouts_per_iteration",
                None,
                "stands for the size of the dataset, which is not known",
                "give it, frames_per_batch or dataset_size",
            )
        return rollouts * self.steps_of_each()

    def test_rollouts(self) -> int:
        """Rollouts of the test after training: one of each environment in each test batch."""
        size = self.test_dataset_size or self.dataset_size
        batches = min(self.num_test_iterations, 1) if self.test_run else self.num_test_iterations
        return batches * (self.frames(size) // self.steps_of_each())

    def normalization_frames(self, num_envs: int, episode_length: int) -> tuple[int, int]:
        """Return batched steps and frames that normalisation takes in one of two environments.

        For each key rollouts of all environments are made, each until the first episode ends,
        until there are ``num_normalization_steps`` frames.
        """
        if not self.normalize_observations:
            return 0, 0
        wanted = 10 if self.test_run else self.num_normalization_steps
        if self.version == "documented":
            return -(-wanted // num_envs), wanted
        steps = min(wanted, episode_length)
        rollouts = -(-wanted // (steps * num_envs)) if wanted else 0
        batched = self.num_normalization_keys * rollouts * steps
        return batched, batched * num_envs

    def learning_rate(self, iteration: int) -> float:
        """Learning rate of ``iteration`` (from 1)."""
        share = 1 - (iteration - 1) / self.num_iterations if self.anneal_lr else 1.0
        return real_number("lr", self.lr) * share

    # ------------------------------------------------------------------ nip's own manner
    def to_dict(self) -> dict[str, Any]:
        """The parameters as plain values, with the name of the class under ``_type``."""
        made = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in type(self).FACTS
        }
        if isinstance(self.body_lr_factor, LrFactors):
            made["body_lr_factor"] = self.body_lr_factor.to_dict()
        return made | {"_type": "RlTrainerParameters"}

    @classmethod
    def from_dict(cls, params_dict: Mapping[str, Any], ignore_extra_keys: bool = False) -> Self:
        """Make the parameters from what :meth:`to_dict` returned.

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
        """Return small parameters for a test: one iteration of two environments."""
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
    named = settings.pop("_type", None)
    wanted = "LrFactors" if cls is LrFactors else "RlTrainerParameters"
    if named not in (None, wanted, cls.__name__):
        raise SettingError(f"{prefix}_type", named, "is another class", [wanted])
    for extra in ("_package_version", "_package_name"):
        settings.pop(extra, None)
    known = [f.name for f in fields(cls)]
    for name in [name for name in settings if name not in known]:
        if not ignore_extra_keys:
            raise SettingError(
                f"{prefix}{name}", settings[name], "is no parameter", nearest_first(name, known)[:3]
            )
        del settings[name]
    return settings
