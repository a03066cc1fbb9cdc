"""Settings shared by recipes: environments, run, algorithm family and networks."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
from kit.config.renamed import RENAMED, RenamedSettings, current_name
from kit.steps import SettingError, StepPlan
from kit.steps.errors import Limits
from kit.steps.foreign import ForeignSteps
from kit.steps.given import GivenFields, completed, given_fields
from kit.steps.schema import NonNegativeInt, PositiveInt
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps


@dataclass
class EnvConfig(GivenFields):
    """Settings of the environments."""

    id: str = "CartPole-v1"
    """Environment ID of Gymnasium, or module:ID."""
    num_envs: Annotated[int, Limits(1, 1_000_000)] = 8
    """Number of parallel environments."""
    vectorization: Literal["sync", "async", "native", "envpool", "tensor"] = "sync"
    """How environments are stepped: sync (in a loop), async (in worker processes), native (the
    environment's own vectorisation), envpool, or tensor (environments written in PyTorch)."""
    action_repeat: PositiveInt = 1
    """Number of env steps each action is repeated for (frame skip)."""
    max_episode_steps: PositiveInt | None = None
    """Policy steps after which an episode is truncated. null: the limit registered for the
    environment."""
    normalize_observation: bool = False
    """Whether observations are normalised with their running mean and variance."""
    normalize_reward: bool = False
    """Whether rewards are divided by the running standard deviation of discounted returns."""
    step_timeout: PositiveFloat | None = None
    """Timeout in seconds for one step or reset in a worker process (async). On a timeout the worker
    is killed and an error is reported. null: no timeout."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, and further arguments of make_env such as restart_on_error."""


@dataclass
class RunConfig(GivenFields, metaclass=RenamedSettings):
    """Settings that every recipe has.

    Assigning a settings group (``env``, ``steps``) stores a copy. Fields that were not set in the
    group get the defaults of the recipe.
    """

    FAMILY: ClassVar[str | None] = None
    """Algorithm family: ``on_policy``, ``off_policy`` or ``offline``; ``None``: any."""

    env: EnvConfig = field(default_factory=EnvConfig)
    collector: str | None = None
    """Collector: vector, tensor (environments written in PyTorch), episode (whole episodes), async
    (collects while the learner trains) or torchrl. null: episode if the steps count episodes, else
    vector."""
    collector_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the collector, such as max_staleness or fast_policy."""
    seed: Seed = 0
    """Seed of the environments, initial weights, exploration and minibatches."""
    device: str = "cpu"
    """Device of networks, batches and buffers, such as cpu, cuda or cuda:1."""
    threads: Annotated[int, Limits(1, 1_024)] | None = 1
    """CPU threads of PyTorch. More than one helps for layers of about 256 units or more. null:
    PyTorch's default."""
    compile: Literal["auto", "exact", True, False] = "auto"
    """How losses are executed: auto (recorded; large matrix products may be rounded differently),
    exact (recorded; bitwise equal to eager), true (torch.compile) or false (eager)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of matrix products in losses. Weights, optimisers and inference stay in float32."""
    logger: str = "csv"
    """Loggers in addition to metrics.csv: wandb, tensorboard, "wandb,tensorboard" or none."""
    log_dir: str | None = "runs"
    """Folder for run folders. null: nothing is written."""
    resume: str | None = None
    """Run folder to resume, or "latest"."""
    init_from: str | None = None
    """Run folder from which to load initial weights and normalisation statistics, or "latest"."""
    log_every: PositiveInt | None = None
    """Policy steps between rows of metrics. null: a hundredth of the run."""
    checkpoint_every: PositiveInt | None = None
    """Policy steps between checkpoints. null: a tenth of the run."""
    keep_best: bool = True
    """Whether checkpoints also keep the policy with the best evaluation."""
    video_every: PositiveInt | None = None
    """Policy steps between videos of one episode, recorded after the next evaluation and at the end
    of the run. Needs a run folder and the extra "video". null: no videos."""
    save_policy: bool = False
    """Whether to save the last and the best policy without optimiser and buffer at the end of the
    run: to the subfolder "policy", and to W&B as a model."""
    time_limit: PositiveFloat | None = None
    """Seconds after which the run stops, at the end of the current iteration. null: no limit."""
    stop_at_return: FiniteFloat | None = None
    """Mean evaluation return at which the run stops. null: never."""
    evaluation_max_steps: PositiveInt = 100_000
    """Policy steps after which an evaluation episode is truncated. The metric
    evaluation/truncated_episodes counts such episodes."""
    progress: bool = True
    """Whether to print the plan, the progress and the step counts."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a setting by its old name, with a warning."""
            if name in RENAMED:
                return getattr(self, current_name(name, type(self)))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; settings groups are completed with the defaults of the recipe."""
        name = current_name(name, type(self))
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
    """Settings of every on-policy recipe: each batch is trained on once, then discarded."""

    FAMILY = "on_policy"

    steps: OnPolicySteps | ForeignSteps | StepPlan = field(default_factory=OnPolicySteps)
    gamma: UnitInterval = 0.99
    """Discount factor."""


@dataclass
class ReplayConfig(RunConfig):
    """Settings of every recipe with a replay buffer of transitions or sequences."""

    FAMILY = "off_policy"

    steps: OffPolicySteps | ForeignSteps | StepPlan = field(default_factory=OffPolicySteps)
    gamma: UnitInterval = 0.99
    """Discount factor."""
    buffer_size: PositiveInt = 1_000_000
    """Capacity of the replay buffer in transitions."""


@dataclass
class OffPolicyConfig(ReplayConfig):
    """Settings of every off-policy recipe: minibatches are sampled from a replay buffer."""

    reward_scale: PositiveFloat = 1.0
    """Factor of the rewards used for training. Logged returns are not scaled."""
    standardize_reward: bool = False
    """Whether rewards are standardised per minibatch, before scaling. Requires n_step=1."""
    n_step: PositiveInt = 1
    """Rewards summed before bootstrapping (n-step returns)."""
    per_alpha: NonNegativeFloat = 0.0
    """Alpha of prioritised replay, the exponent of TD errors (Schaul et al. 2016). 0: uniform
    sampling."""
    per_beta: UnitInterval = 0.4
    """Beta of prioritised replay, the exponent of importance weights. It increases to 1 during the
    run. 0: no weights."""
    hindsight: Literal["future", "final", "episode"] | None = None
    """Hindsight relabelling of the goals of 80 % of the sampled transitions (Andrychowicz et al.
    2017). New goals are achieved ones: later in the episode (future), at its end (final), or
    anywhere in it (episode). null: no relabelling."""
    store_next_observation: bool = True
    """Whether the buffer stores both observations of each transition. false: each observation is
    stored once, which halves the memory."""
    stacked_frames: NumFrames = 1
    """Frames stacked in each observation. The buffer stores only the newest frame. 1: observations
    are stored unchanged."""
    buffer_folder: str | None = None
    """Folder for memory-mapped buffer files, for buffers larger than memory. null: the buffer is in
    memory."""


@dataclass
class OfflineConfig(RunConfig):
    """Settings of every offline recipe: minibatches are sampled from a stored dataset."""

    FAMILY = "offline"

    steps: OfflineSteps | StepPlan = field(default_factory=OfflineSteps)
    dataset: list[str] = field(default_factory=list)
    """Datasets in Minari's format, concatenated: folders, or minari:ID for downloaded datasets."""
    normalize_data: bool = True
    """Whether observations are normalised with the mean and standard deviation of the dataset."""


@dataclass
class NetworkConfig:
    """Network settings of recipes whose networks share no layers."""

    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Sizes of the hidden layers."""
    activation: str = "relu"
    """Activation function: tanh, sigmoid_tanh (tanh, faster on CPUs), relu, elu, silu or gelu."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum gradient norm. null: no clipping."""


@dataclass
class CriticNetworkConfig(NetworkConfig):
    """Network settings of recipes with an actor and Q-networks."""

    critic_hidden_sizes: HiddenSizes | None = None
    """Sizes of the critics' hidden layers. null: hidden_sizes."""

    @property
    def critic_sizes(self) -> list[int]:
        """Sizes of the critics' hidden layers."""
        sizes = self.critic_hidden_sizes
        return self.hidden_sizes if sizes is None else sizes


@dataclass
class ActorCriticConfig(OnPolicyConfig):
    """Settings of every on-policy recipe with an actor and a critic."""

    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Sizes of the hidden layers of actor and critic."""
    critic_hidden_sizes: HiddenSizes | None = None
    """Sizes of the critic's hidden layers. null: hidden_sizes."""
    activation: str = "tanh"
    """Activation function: tanh, sigmoid_tanh (tanh, faster on CPUs), relu, elu, silu or gelu."""
    shared_backbone: bool = False
    """Whether actor and critic share their hidden layers."""
    initial_log_std: LogStd = 0.0
    """Initial log standard deviation of the Gaussian policy."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: ScheduleName = "constant"
    """Schedule of entropy_coeff; same options as lr_schedule."""
    critic_coeff: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    critic_schedule: ScheduleName = "constant"
    """Schedule of critic_coeff; same options as lr_schedule."""
    critic_loss: Literal["l2", "l1", "smooth_l1"] = "l2"
    """Value loss: squared error (l2), absolute error (l1) or Huber loss (smooth_l1)."""
    gae_lambda: UnitInterval = 0.95
    """Lambda of generalised advantage estimation. 1: Monte Carlo returns, bootstrapped at the end
    of a batch."""
    normalize_advantage: bool = True
    """Whether advantages are normalised to mean 0 and standard deviation 1."""
    advantage_norm: Literal["minibatch", "batch", "running"] = "minibatch"
    """Statistics that normalise advantages: per minibatch, per batch, or running."""
    learning_rate: PositiveFloat = 1e-3
    """Initial learning rate."""
    backbone_lr_scale: PositiveFloat = 1.0
    """Learning-rate multiplier of the hidden layers. Output layers use learning_rate."""
    lr_schedule: ScheduleName = "linear"
    """Learning-rate schedule: constant, or linear or cosine decay to 0. "warmup 0.1 cosine"
    increases from 0 during the first tenth of the run; "piecewise 0.5 0.1" multiplies by 0.1 after
    half of the run."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Maximum gradient norm. null: no clipping."""

    @property
    def networks(self) -> dict[str, Any]:
        """Arguments of :func:`~kit.modules.make_actor_critic`."""
        names = ("hidden_sizes", "critic_hidden_sizes", "activation", "shared_backbone", "device")
        return {name: getattr(self, name) for name in (*names, "initial_log_std")}

    @property
    def normalize_minibatch(self) -> bool:
        """Whether the loss normalises advantages per minibatch."""
        return self.normalize_advantage and self.advantage_norm == "minibatch"

    @property
    def standardize(self) -> Literal["batch", "running"] | None:
        """Statistics with which the estimator normalises advantages; ``None``: it does not."""
        if not self.normalize_advantage or self.advantage_norm == "minibatch":
            return None
        return self.advantage_norm

    @property
    def horizon(self) -> dict[str, Any]:
        """Arguments of :class:`~kit.advantages.GAE`."""
        return {"gamma": self.gamma, "lmbda": self.gae_lambda, "standardize": self.standardize}

    @property
    def schedules(self) -> dict[str, str]:
        """Schedules of the loss coefficients, for :func:`~kit.hooks.anneal_coefficients`."""
        return {"entropy_coeff": self.entropy_schedule, "critic_coeff": self.critic_schedule}


@dataclass
class FittedCriticConfig(ActorCriticConfig):
    """Settings of recipes that can fit the critic separately from the policy."""

    critic_epochs: NonNegativeInt = 0
    """Passes over each batch that fit the critic separately, before advantages are computed. 0:
    train the critic jointly with the policy, weighted by critic_coeff."""
    critic_minibatch_size: PositiveInt = 64
    """Transitions per minibatch of the separate critic fit."""
    critic_learning_rate: PositiveFloat = 1e-3
    """Learning rate of the separate critic fit."""

    @property
    def joint_critic_coeff(self) -> float | None:
        """Weight of the value loss in the joint loss; ``None``: the critic is fitted separately.

        Raises:
            SettingError: if a setting has no effect with this value of ``critic_epochs``.
        """
        joint = ["critic_coeff", "critic_schedule", "shared_backbone"]
        joint += ["clip_value"] if hasattr(self, "clip_value") else []  # only PPO has it
        separate = ("critic_minibatch_size", "critic_learning_rate")
        defaults = type(self)()
        for name in joint if self.critic_epochs else separate:
            value, default = getattr(self, name), getattr(defaults, name)
            if value != default:
                reason = f"It has no effect with critic_epochs={self.critic_epochs}"
                raise SettingError(name, value, reason, [default])
        return None if self.critic_epochs else self.critic_coeff
