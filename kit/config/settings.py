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
    """Environment settings."""

    id: str = "CartPole-v1"
    """Gymnasium environment ID. Use module:ID to import a module first."""
    num_envs: Annotated[int, Limits(1, 1_000_000)] = 8
    """Number of parallel environments."""
    vectorization: Literal["sync", "async", "native", "envpool", "tensor"] = "sync"
    """How environments are stepped: sync (in a loop), async (in worker processes), native (the
    environment's own vectorised version), envpool, or tensor (for environments written in
    PyTorch)."""
    action_repeat: PositiveInt = 1
    """Number of env steps for which each action is repeated (frame skip)."""
    max_episode_steps: PositiveInt | None = None
    """Policy steps after which an episode is truncated. null: the environment's registered
    limit."""
    wrappers: list[str | dict[str, Any]] = field(default_factory=list)
    """Wrappers for each environment, innermost first and before action repeat: module:Class, or a
    mapping of module:Class to keyword arguments."""
    normalize_observation: bool = False
    """Whether observations are normalised using their running mean and variance."""
    normalize_reward: bool = False
    """Whether rewards are divided by the running standard deviation of the discounted return."""
    step_timeout: PositiveFloat | None = None
    """Timeout in seconds for one step or reset in a worker process (vectorization=async). On
    timeout, the worker is killed and an error is reported. null: no timeout."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment, and further arguments for make_env, such as
    restart_on_error."""


@dataclass
class RunConfig(GivenFields, metaclass=RenamedSettings):
    """Settings shared by all recipes.

    Assigning a settings group (``env``, ``steps``) stores a copy. In the copy, fields that were not
    set explicitly get the recipe's defaults.
    """

    FAMILY: ClassVar[str | None] = None
    """Algorithm family: ``on_policy``, ``off_policy`` or ``offline``. ``None``: any family."""

    env: EnvConfig = field(default_factory=EnvConfig)
    collector: str | None = None
    """How data is collected: vector, tensor (for environments written in PyTorch), episode
    (complete episodes), async (in parallel with training), ray (several processes) or torchrl
    (TorchRL's Collector). null: episode if iterations collect complete episodes
    (steps.steps_per_env=null), otherwise vector."""
    collector_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments for the collector, such as max_staleness or fast_policy."""
    seed: Seed = 0
    """Seed for environments, initial weights, exploration and minibatch sampling."""
    evaluation_seed: Seed | None = None
    """Seed for evaluation environments and evaluated policies. null: same as seed."""
    device: str = "cpu"
    """Device for networks, batches and buffers, such as cpu, cuda or cuda:1."""
    threads: Annotated[int, Limits(1, 1_024)] | None = 1
    """Number of CPU threads used by PyTorch. More than one helps only for layers of about 256 units
    or more. null: PyTorch's default."""
    compile: Literal["auto", "exact", True, False] = "auto"
    """How gradient steps are executed: auto (traced; large matrix products may round differently
    from eager mode), exact (traced; bitwise equal to eager mode on CPUs), true (torch.compile) or
    false (eager mode)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type for matrix products in losses. Weights, optimiser states and inference stay in
    float32."""
    logger: str = "csv"
    """Where metrics are logged: csv (metrics.csv only), wandb, tensorboard or "wandb,tensorboard"
    (each in addition to metrics.csv), or none (same as csv)."""
    log_dir: str | None = "runs"
    """Parent folder for all runs. null: write nothing to disk."""
    resume: str | None = None
    """Run folder to resume, or "latest" for the newest run of this recipe. null: start a new
    run."""
    init_from: str | None = None
    """Run folder from which to load initial weights and normalisation statistics, or "latest" for
    the newest run of this recipe. null: random initial weights."""
    log_every: PositiveInt | None = None
    """Policy steps (offline: gradient steps) between rows in metrics.csv. null: 1 % of the run."""
    checkpoint_every: PositiveInt | None = None
    """Policy steps (offline: gradient steps) between checkpoints. null: 10 % of the run."""
    keep_best: bool = True
    """Whether checkpoints also contain the policy with the best evaluation."""
    video_every: PositiveInt | None = None
    """Policy steps (offline: gradient steps) between videos. Each video shows one episode and is
    recorded after the next evaluation. The last evaluation is always recorded. Needs a run folder
    and the extra "video". null: no videos."""
    save_policy: bool = False
    """Whether to save the last and the best policy, without optimiser and replay buffer, at the end
    of the run. They are saved in the subfolder "policy", and in W&B as a model."""
    time_limit: PositiveFloat | None = None
    """Time limit in seconds. The run stops at the end of the iteration that exceeds it. null: no
    limit."""
    stop_at_return: FiniteFloat | None = None
    """Mean evaluation return at which the run stops early. null: never stop early."""
    rank_timeout: PositiveFloat = 600.0
    """Seconds that the processes of torchrun wait for one that does not respond, before they end.
    Evaluations and checkpoints may take longer."""
    evaluation_max_steps: PositiveInt = 100_000
    """Policy steps after which an evaluation episode is truncated. The metric
    evaluation/truncated_episodes counts these episodes."""
    progress: bool = True
    """Whether to print the plan, the progress and the step counts."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the setting with this deprecated name, and warn about the name."""
            if name in RENAMED:
                return getattr(self, current_name(name, type(self)))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Settings groups are completed with the recipe's defaults."""
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
    """Settings shared by on-policy recipes, which discard each batch after its update phase."""

    FAMILY = "on_policy"

    steps: OnPolicySteps | ForeignSteps | StepPlan = field(default_factory=OnPolicySteps)
    gamma: UnitInterval = 0.99
    """Discount factor."""


@dataclass
class ReplayConfig(RunConfig):
    """Settings shared by recipes with a replay buffer of transitions or sequences."""

    FAMILY = "off_policy"

    steps: OffPolicySteps | ForeignSteps | StepPlan = field(default_factory=OffPolicySteps)
    gamma: UnitInterval = 0.99
    """Discount factor."""
    buffer_size: PositiveInt = 1_000_000
    """Capacity of the replay buffer in transitions."""


@dataclass
class OffPolicyConfig(ReplayConfig):
    """Settings shared by off-policy recipes, which sample minibatches from a replay buffer."""

    reward_scale: PositiveFloat = 1.0
    """Factor applied to rewards during training. Logged returns are not scaled."""
    standardize_reward: bool = False
    """Whether rewards are standardised per minibatch before scaling. Requires n_step=1."""
    n_step: PositiveInt = 1
    """Number of rewards summed before bootstrapping (n-step returns)."""
    per_alpha: NonNegativeFloat = 0.0
    """Alpha for prioritised replay: exponent of the TD errors (Schaul et al. 2016). 0: uniform
    sampling."""
    per_beta: UnitInterval = 0.4
    """Initial beta for prioritised replay: exponent of the importance weights. Beta increases
    linearly to 1 over the run. 0: no importance weights."""
    hindsight: Literal["future", "final", "episode"] | None = None
    """Hindsight relabelling (Andrychowicz et al. 2017): 80 % of the sampled transitions get a goal
    achieved later in the episode (future), at its end (final) or anywhere in it (episode). null: no
    relabelling."""
    store_next_observation: bool = True
    """Whether the buffer stores both observations of each transition. false: each observation is
    stored only once, which halves memory usage."""
    stacked_frames: NumFrames = 1
    """Number of frames stacked in each observation. Environments that do not stack this many frames
    are wrapped. The buffer stores only the newest frame. 1: no stacking, and whole observations are
    stored."""
    buffer_folder: str | None = None
    """Folder for memory-mapped buffer files, for buffers larger than memory. null: keep the buffer
    in memory."""

    @property
    def observation_storage(self) -> dict[str, Any]:
        """Arguments for :func:`~kit.buffers.make_replay_buffer` that save memory.

        Another library's step settings may set them for a recipe with n-step returns, which need
        the whole observations of each transition. The arguments are then empty.
        """
        if self.n_step > 1 and not isinstance(self.steps, OffPolicySteps):
            return {}
        names = ("store_next_observation", "stacked_frames")
        return {name: getattr(self, name) for name in names}


@dataclass
class OfflineConfig(RunConfig):
    """Settings shared by offline recipes, which sample minibatches from a stored dataset."""

    FAMILY = "offline"

    steps: OfflineSteps | StepPlan = field(default_factory=OfflineSteps)
    dataset: list[str] = field(default_factory=list)
    """Datasets in Minari format: folders, or minari:ID for downloaded datasets. Several datasets
    are concatenated."""
    normalize_data: bool = True
    """Whether observations are normalised using the mean and standard deviation of the dataset."""


@dataclass
class NetworkConfig:
    """Network settings for recipes whose networks share no layers."""

    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Hidden layer sizes."""
    activation: str = "relu"
    """Activation function: tanh, sigmoid_tanh (tanh, faster on CPUs), relu, elu, silu or gelu."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum gradient norm. null: no clipping."""


@dataclass
class CriticNetworkConfig(NetworkConfig):
    """Network settings for recipes with an actor and Q-networks."""

    critic_hidden_sizes: HiddenSizes | None = None
    """Hidden layer sizes for the critics. null: same as hidden_sizes."""

    @property
    def critic_sizes(self) -> list[int]:
        """Hidden layer sizes for the critics."""
        sizes = self.critic_hidden_sizes
        return self.hidden_sizes if sizes is None else sizes


@dataclass
class ActorCriticConfig(OnPolicyConfig):
    """Settings shared by on-policy recipes with an actor and a critic."""

    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Hidden layer sizes for the actor and the critic."""
    critic_hidden_sizes: HiddenSizes | None = None
    """Hidden layer sizes for the critic. null: same as hidden_sizes."""
    activation: str = "tanh"
    """Activation function: tanh, sigmoid_tanh (tanh, faster on CPUs), relu, elu, silu or gelu."""
    shared_backbone: bool = False
    """Whether the actor and the critic share their hidden layers."""
    initial_log_std: LogStd = 0.0
    """Initial log standard deviation of the Gaussian policy."""
    orthogonal: bool = True
    """Whether weights are initialised orthogonally. false: PyTorch's initialisation."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: ScheduleName = "constant"
    """How entropy_coeff changes over the run; same options as lr_schedule."""
    critic_coeff: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    critic_schedule: ScheduleName = "constant"
    """How critic_coeff changes over the run; same options as lr_schedule."""
    critic_loss: Literal["l2", "l1", "smooth_l1"] = "l2"
    """Value loss: squared error (l2), absolute error (l1) or Huber loss (smooth_l1)."""
    gae_lambda: UnitInterval = 0.95
    """Lambda for generalised advantage estimation (GAE). 1: Monte Carlo returns that bootstrap only
    at the end of a batch."""
    normalize_advantage: bool = True
    """Whether advantages are normalised to mean 0 and standard deviation 1."""
    advantage_norm: Literal["minibatch", "batch", "running"] = "minibatch"
    """Statistics used to normalise advantages: per minibatch, per batch or running."""
    learning_rate: PositiveFloat = 1e-3
    """Initial learning rate."""
    backbone_lr_scale: PositiveFloat = 1.0
    """Learning-rate multiplier for the hidden layers. Output layers use learning_rate."""
    critic_backbone_lr_scale: PositiveFloat | None = None
    """Learning-rate multiplier for the hidden layers of the critic. null: same as
    backbone_lr_scale."""
    lr_schedule: ScheduleName = "linear"
    """Learning-rate schedule: constant; linear or cosine (decay to 0); "warmup 0.1 cosine" (linear
    warm-up during the first 10 % of the run, then cosine); "piecewise 0.5 0.1" (multiplied by 0.1
    halfway through the run); or "exponential 0.99" (multiplied by 0.99 after each iteration; with
    "exponential 0.99 5", after every fifth)."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Maximum gradient norm. null: no clipping."""

    @property
    def networks(self) -> dict[str, Any]:
        """Arguments for :func:`~kit.modules.make_actor_critic`."""
        names = ("hidden_sizes", "critic_hidden_sizes", "activation", "shared_backbone", "device")
        return {name: getattr(self, name) for name in (*names, "initial_log_std", "orthogonal")}

    @property
    def learning_rates(self) -> dict[str, Any]:
        """Arguments for :func:`~kit.modules.parameter_groups`."""
        return {
            "learning_rate": self.learning_rate,
            "body_factor": self.backbone_lr_scale,
            "critic_body_factor": self.critic_backbone_lr_scale,
        }

    @property
    def normalize_minibatch(self) -> bool:
        """Whether the loss normalises advantages per minibatch."""
        return self.normalize_advantage and self.advantage_norm == "minibatch"

    @property
    def standardize(self) -> Literal["batch", "running"] | None:
        """Statistics for normalisation in the advantage estimator. ``None``: no normalisation."""
        if not self.normalize_advantage or self.advantage_norm == "minibatch":
            return None
        return self.advantage_norm

    @property
    def horizon(self) -> dict[str, Any]:
        """Arguments for :class:`~kit.advantages.GAE`."""
        return {"gamma": self.gamma, "lmbda": self.gae_lambda, "standardize": self.standardize}

    @property
    def schedules(self) -> dict[str, str]:
        """Loss coefficient schedules for :func:`~kit.hooks.anneal_coefficients`."""
        return {"entropy_coeff": self.entropy_schedule, "critic_coeff": self.critic_schedule}


@dataclass
class StateDependentNoiseConfig:
    """Settings for recipes with state-dependent exploration."""

    gsde: bool = False
    """Whether the exploration noise is a function of the state, gSDE (Raffin et al. 2022). false:
    each action has independent noise."""
    gsde_sample_freq: PositiveInt | Literal[-1] = -1
    """Number of policy steps per env after which the noise function is sampled again within a
    batch. -1: only before each batch."""


@dataclass
class SquashedNoiseConfig(StateDependentNoiseConfig):
    """Settings for off-policy recipes with state-dependent exploration and squashed actions."""

    gsde_at_warmup: bool = False
    """Whether the policy acts with gsde's noise instead of the random actions at the start."""
    gsde_expln: bool = False
    """Whether gsde's standard deviations grow slower than exponentially above 1 (expln in the
    paper)."""
    initial_log_std: LogStd = -3.0
    """Initial log standard deviation of gsde's noise functions."""

    @property
    def distribution(self) -> dict[str, Any]:
        """Arguments for :func:`~kit.modules.make_actor` that select the action distribution."""
        if not self.gsde:
            return {"continuous": "tanh_normal"}
        continuous = "tanh_gsde_expln" if self.gsde_expln else "tanh_gsde"
        return {"continuous": continuous, "initial_log_std": self.initial_log_std}


@dataclass
class FittedCriticConfig(ActorCriticConfig):
    """Settings for recipes that can fit the critic separately from the policy."""

    critic_epochs: NonNegativeInt = 0
    """Number of epochs for which the critic is fitted separately on each batch, before advantages
    are computed. 0: train the critic jointly with the policy, weighted by critic_coeff."""
    critic_minibatch_size: PositiveInt = 64
    """Transitions per minibatch in the separate critic fit."""
    critic_learning_rate: PositiveFloat = 1e-3
    """Initial learning rate for the separate critic fit."""
    critic_lr_schedule: ScheduleName = "constant"
    """Learning-rate schedule for the separate critic fit; same options as lr_schedule."""
    critic_max_grad_norm: PositiveFloat | Literal["same"] | None = "same"
    """Maximum gradient norm in the separate critic fit. same: as max_grad_norm. null: no
    clipping."""

    @property
    def joint_critic_coeff(self) -> float | None:
        """Weight of the value loss in the joint loss. ``None``: the critic is fitted separately.

        Raises:
            SettingError: if a setting has no effect with this value of ``critic_epochs``.
        """
        joint = ["critic_coeff", "critic_schedule", "shared_backbone", "critic_backbone_lr_scale"]
        joint += ["clip_value"] if hasattr(self, "clip_value") else []  # only PPO has clip_value
        separate = ["critic_minibatch_size", "critic_learning_rate", "critic_lr_schedule"]
        separate += ["critic_max_grad_norm"]
        defaults = type(self)()
        for name in joint if self.critic_epochs else separate:
            value, default = getattr(self, name), getattr(defaults, name)
            if value != default:
                reason = f"It has no effect with critic_epochs={self.critic_epochs}"
                raise SettingError(name, value, reason, [default])
        return None if self.critic_epochs else self.critic_coeff
