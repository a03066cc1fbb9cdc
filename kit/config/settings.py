"""The settings that recipes share: environments, the run, the family of an algorithm, networks."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from kit.config.limits import (
    FiniteFloat,
    HiddenSizes,
    LogStd,
    NonNegativeFloat,
    NumFrames,
    PositiveFloat,
    ScheduleName,
    Seed,
    UnitInterval,
)
from kit.steps import SettingError, StepPlan
from kit.steps.errors import Limits
from kit.steps.foreign import ForeignSteps
from kit.steps.given import GivenFields, completed, given_fields
from kit.steps.schema import NonNegativeInt, PositiveInt
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps


@dataclass
class EnvConfig(GivenFields):
    """The environments."""

    id: str = "CartPole-v1"
    """Gymnasium id."""
    num_envs: Annotated[int, Limits(1, 1_000_000)] = 8
    """Number of environments of one process."""
    vectorization: Literal["sync", "async", "native", "envpool", "tensor"] = "sync"
    """How environments are stepped: sync (one after the other), async (in worker processes), native
    (the environment's own vector environment), envpool, or tensor (written in torch)."""
    action_repeat: PositiveInt = 1
    """Env steps that one action is held for."""
    max_episode_steps: PositiveInt | None = None
    """Policy steps after which an episode is truncated; null: as the environment is registered."""
    normalize_observation: bool = False
    """Whether observations are normalised to running mean 0 and variance 1."""
    normalize_reward: bool = False
    """Whether rewards are divided by the running standard deviation of the discounted return."""
    step_timeout: PositiveFloat | None = None
    """Seconds that one step or reset of an environment in a worker process (async) may take; what
    takes longer is a fault, and its process is killed; null: no limit."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment itself, and further ones of make_env: restart_on_error, ..."""


@dataclass
class RunConfig(GivenFields):
    """Settings of every recipe besides its algorithm.

    A group of settings (``env``, ``steps``) keeps the recipe's defaults in fields that were not
    given. The configuration holds a copy of the group.
    """

    FAMILY: ClassVar[str | None] = None
    """Family of the algorithm, ``on_policy`` or ``off_policy``; ``None``: either."""

    env: EnvConfig = field(default_factory=EnvConfig)
    collector: str | None = None
    """Collector: vector, tensor (environments written in torch), episode (whole episodes), async
    (while the learner works) or torchrl; null: vector, or episode if the plan asks for it."""
    collector_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the collector: max_staleness, fast_policy, layout, ..."""
    seed: Seed = 0
    """Seed of environments, initial weights, exploration and minibatches."""
    device: str = "cpu"
    """Device of networks, batches and buffers: cpu, cuda, cuda:1."""
    threads: Annotated[int, Limits(1, 1_024)] | None = 1
    """CPU threads of PyTorch; more pay from layers of about 256 on. null: PyTorch's choice."""
    compile: Literal["auto", "exact", True, False] = "auto"
    """How losses run: auto (flat programs, which may round large matrix products otherwise), exact
    (flat programs, bitwise as eager), true (torch.compile) or false (eager)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type in which a loss multiplies matrices; weights, optimisers and acting stay float32."""
    logger: str = "csv"
    """Loggers besides metrics.csv: wandb, tensorboard, or both, separated by a comma; or none."""
    log_dir: str | None = "runs"
    """Folder in which each run gets a folder of its own; null: nothing is written."""
    resume: str | None = None
    """Run folder to resume, or "latest"."""
    init_from: str | None = None
    """Run folder whose last weights and normalisation a new run begins with, or "latest"."""
    log_every: PositiveInt | None = None
    """Policy steps between two rows of metrics; null: a hundredth of the run."""
    checkpoint_every: PositiveInt | None = None
    """Policy steps between two checkpoints; null: a tenth of the run."""
    keep_best: bool = True
    """Whether the policy of the best evaluation is kept, in checkpoints beside the last one."""
    video_every: PositiveInt | None = None
    """Policy steps between videos of an episode, recorded after the next evaluation and after that
    at the end of the plan (needs a run folder and the extra "video"); null: none."""
    save_policy: bool = False
    """Whether the policy alone is written at the end, last and best weights with settings, to the
    folder "policy" of the run (needs a run folder), and given to W&B as its model."""
    time_limit: PositiveFloat | None = None
    """Seconds after which the run ends, with the iteration under way; null: none."""
    stop_at_return: FiniteFloat | None = None
    """Mean return of an evaluation at which the run ends; null: none."""
    evaluation_max_steps: PositiveInt = 100_000
    """Policy steps after which an episode of an evaluation is cut if it has not ended; the column
    evaluation/truncated_episodes is the number of such episodes."""
    progress: bool = True
    """Whether plan, progress and ledger are shown in the terminal."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a group of settings is completed by the recipe's defaults for it."""
        declared = self.__dataclass_fields__.get(name)
        if isinstance(value, GivenFields) and declared is not None:
            is_default = name not in vars(self) and name not in given_fields(self)
            factory = declared.default_factory
            default = None if factory is MISSING else factory()
            if isinstance(default, GivenFields) and isinstance(value, type(default)):
                value = completed(value, default, is_default)
        super().__setattr__(name, value)


@dataclass
class OnPolicyConfig(RunConfig):
    """Settings of every on-policy recipe: batches are trained on once collected, then discarded."""

    FAMILY = "on_policy"

    steps: OnPolicySteps | ForeignSteps | StepPlan = field(default_factory=OnPolicySteps)
    gamma: UnitInterval = 0.99
    """Discount factor."""


@dataclass
class ReplayConfig(RunConfig):
    """Settings of every recipe with a replay memory, of transitions or sequences."""

    FAMILY = "off_policy"

    steps: OffPolicySteps | ForeignSteps | StepPlan = field(default_factory=OffPolicySteps)
    gamma: UnitInterval = 0.99
    """Discount factor."""
    buffer_size: PositiveInt = 1_000_000
    """Transitions that the replay buffer holds."""


@dataclass
class OffPolicyConfig(ReplayConfig):
    """Settings of every off-policy recipe: minibatches are sampled from a replay buffer."""

    reward_scale: PositiveFloat = 1.0
    """Factor of the rewards that are learned from; returns are logged as they are."""
    standardize_reward: bool = False
    """Whether rewards of a minibatch get mean 0 and deviation 1, before they are scaled; with
    n_step=1."""
    n_step: PositiveInt = 1
    """Rewards summed into one before bootstrapping (n-step returns)."""
    per_alpha: NonNegativeFloat = 0.0
    """Exponent of errors as priorities (Schaul et al. 2016); 0: minibatches are uniform."""
    per_beta: UnitInterval = 0.4
    """Exponent of the weights that correct priorities; it rises to 1 during the run. 0: there are
    none."""
    hindsight: Literal["future", "final", "episode"] | None = None
    """Goals that replace those of 80 % of the sampled transitions (Andrychowicz et al. 2017): ones
    achieved later in the episode, at its end, or anywhere in it; null: no goal is replaced."""
    store_next_observation: bool = True
    """Whether the buffer stores both observations of a transition; false: each one once."""
    stacked_frames: NumFrames = 1
    """Frames in an observation of which the buffer stores the newest alone; 1: all it has."""
    buffer_folder: str | None = None
    """Folder on whose disk the buffer is, for more than memory holds; null: it is in memory."""


@dataclass
class OfflineConfig(RunConfig):
    """Settings of every offline recipe: minibatches are drawn from a stored data set."""

    FAMILY = "offline"

    steps: OfflineSteps | StepPlan = field(default_factory=OfflineSteps)
    dataset: list[str] = field(default_factory=list)
    """Data sets in Minari's format, joined: folders, or minari:ID for installed ones."""
    normalize_data: bool = True
    """Whether observations are normalised by the mean and the deviation of the data set."""


@dataclass
class NetworkConfig:
    """Settings of the networks of most recipes whose losses share none, besides their algorithm."""

    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers."""
    activation: str = "relu"
    """Activation: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum norm of the gradient; null: unclipped."""


@dataclass
class CriticNetworkConfig(NetworkConfig):
    """The same of recipes with critics of actions."""

    critic_hidden_sizes: HiddenSizes | None = None
    """Widths of the hidden layers of the critics; null: as hidden_sizes, those of the actor."""

    @property
    def critic_sizes(self) -> list[int]:
        """Widths of the hidden layers of the critics."""
        own = self.critic_hidden_sizes
        return self.hidden_sizes if own is None else own


@dataclass
class ActorCriticConfig(OnPolicyConfig):
    """What every recipe with an actor and a critic has."""

    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of actor and critic."""
    critic_hidden_sizes: HiddenSizes | None = None
    """Widths of the hidden layers of the critic; null: as hidden_sizes."""
    activation: str = "tanh"
    """Activation: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    shared_backbone: bool = False
    """Whether actor and critic share their hidden layers."""
    initial_log_std: LogStd = 0.0
    """Initial log standard deviation of the Gaussian policy."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: ScheduleName = "constant"
    """Schedule of that weight; the same choices as anneal."""
    critic_coeff: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    critic_schedule: ScheduleName = "constant"
    """Schedule of that weight; the same choices as anneal."""
    critic_loss: Literal["l2", "l1", "smooth_l1"] = "l2"
    """Distance between value and return: squared, absolute, or both (Huber)."""
    gae_lambda: UnitInterval = 0.95
    """Lambda of generalised advantage estimation; 1: returns with a bootstrapped end."""
    normalize_advantage: bool = True
    """Whether advantages are normalised to mean 0 and deviation 1."""
    advantage_norm: Literal["minibatch", "batch", "running"] = "minibatch"
    """Rows over which they are normalised: each minibatch, each batch, or all batches so far."""
    learning_rate: PositiveFloat = 1e-3
    """Initial learning rate."""
    backbone_lr_scale: PositiveFloat = 1.0
    """Factor of the learning rate of the hidden layers; the output layers have it as it is."""
    lr_schedule: ScheduleName = "linear"
    """Schedule of the learning rate, down to 0: linear, cosine or constant; "warmup 0.1 cosine"
    rises from 0 in a tenth of the run; "piecewise 0.5 0.1" is a tenth from half of the run on."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Maximum norm of the gradient; null: unclipped."""

    @property
    def networks(self) -> dict[str, Any]:
        """Arguments of :func:`~kit.modules.make_actor_critic`."""
        names = ("hidden_sizes", "critic_hidden_sizes", "activation", "shared_backbone", "device")
        return {name: getattr(self, name) for name in (*names, "initial_log_std")}

    @property
    def normalize_minibatch(self) -> bool:
        """Whether the loss normalises advantages."""
        return self.normalize_advantage and self.advantage_norm == "minibatch"

    @property
    def standardize(self) -> Literal["batch", "running"] | None:
        """Rows over which the estimator standardises advantages; ``None``: it does not."""
        if not self.normalize_advantage or self.advantage_norm == "minibatch":
            return None
        return self.advantage_norm

    @property
    def horizon(self) -> dict[str, Any]:
        """Arguments of :class:`~kit.advantages.GAE`."""
        return {"gamma": self.gamma, "lmbda": self.gae_lambda, "standardize": self.standardize}

    @property
    def schedules(self) -> dict[str, str]:
        """Schedules of the loss's weights, for :func:`~kit.hooks.anneal_coefficients`."""
        return {"entropy_coeff": self.entropy_schedule, "critic_coeff": self.critic_schedule}


@dataclass
class FittedCriticConfig(ActorCriticConfig):
    """What recipes have whose critic may be fitted on its own."""

    critic_epochs: NonNegativeInt = 0
    """Passes over each batch in which an optimiser of its own fits the critic, before advantages
    are estimated; 0: it learns with the policy, by the weight critic_coeff."""
    critic_minibatch_size: PositiveInt = 64
    """Transitions in a minibatch of these passes."""
    critic_learning_rate: PositiveFloat = 1e-3
    """Learning rate of these passes."""

    @property
    def joint_critic_coeff(self) -> float | None:
        """Weight of the value loss among the policy's; ``None``: the critic is fitted alone.

        Raises:
            SettingError: if a setting is given that means nothing for the way it learns.
        """
        together = ["critic_coeff", "critic_schedule", "shared_backbone"]
        together += ["clip_value"] if hasattr(self, "clip_value") else []  # of PPO
        alone = ("critic_minibatch_size", "critic_learning_rate")
        usual = type(self)()
        for name in together if self.critic_epochs else alone:
            given, works = getattr(self, name), getattr(usual, name)
            if given != works:
                why = f"means nothing with critic_epochs={self.critic_epochs}"
                raise SettingError(name, given, why, [works])
        return None if self.critic_epochs else self.critic_coeff
