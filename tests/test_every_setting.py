"""Every setting of every recipe changes what it should: weights, counts, files, or a part."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

import recipes
from kit.config.parts import resolve
from kit.config.plain import from_plain
from kit.steps import SettingError
from kit.testing.envs import Glimpse
from tests.fuzz.random_configs import leaves_of, small_config
from tests.stored import NAMES, read_stored

RECIPES = [module.name for module in pkgutil.iter_modules(recipes.__path__)]


class Outcome(NamedTuple):
    """What a run leaves behind."""

    weights: list[Any]
    counts: dict[str, int]
    table: str
    files: list[str]
    rows: int
    trainer: Any
    threads: int
    shown: str


Look = Callable[[Outcome], Any]


def weights(run: Outcome) -> Any:
    """Parameters of all networks at the end, targets included."""
    return run.weights


def counts(name: str) -> Look:
    """A count of the ledger."""
    return lambda run: run.counts[name]


def part(path: str) -> Look:
    """The type of a part of the trainer, or its value where it is plain."""

    def look(run: Outcome) -> Any:
        found = functools.reduce(getattr, path.split("."), run.trainer)
        return found if isinstance(found, (bool, int, float, str)) else type(found).__name__

    return look


def losses(run: Outcome) -> Any:
    """The types of the loss module and its parts: a body that is shared surrounds a loss."""
    return [type(module).__name__ for module in run.trainer.loss_module.modules()]


def refused(run: Outcome) -> Any:
    """Nothing: the setting is refused, and there is no run."""
    raise AssertionError(run)


class Effect(NamedTuple):
    """A value of a setting, and where a run differs from one without it."""

    value: Any
    look: Look = weights
    given: Mapping[str, Any] = MappingProxyType({})
    """Other settings of both runs."""


PENDULUM = {"env.id": "Pendulum-v1"}
SEVERAL_EPOCHS = {"steps.update_epochs": 4}
EPISODES = {"steps.steps_per_env": None, "env.max_episode_steps": 4}
NO_STEPS = dict.fromkeys(["steps.steps_per_env", "steps.min_steps", "steps.min_episodes"])
BATCHES_OF_EPISODES = {**EPISODES, "steps.minibatch_size": None}

EFFECTS: dict[str, Effect] = {
    # environments
    "env.id": Effect("MountainCarContinuous-v0"),
    "env.num_envs": Effect(4, part("collector.num_envs")),
    "env.vectorization": Effect("async", part("collector.env.backend")),
    "env.action_repeat": Effect(2, counts("env_steps")),
    "env.max_episode_steps": Effect(3, counts("episodes")),
    "env.wrappers": Effect(
        [{"gymnasium.wrappers:ClipReward": {"max_reward": 9.0}}],
        lambda run: "ClipReward" in str(run.trainer.evaluate.env.backend.envs[0]),
    ),
    "env.normalize_observation": Effect(None),
    "env.normalize_reward": Effect(None),
    "env.step_timeout": Effect(
        60.0,
        lambda run: run.trainer.collector.env.backend._workers[0].step_timeout,
        {"env.vectorization": "async"},
    ),
    "env.kwargs": Effect({"restart_on_error": 3}, part("collector.env.backend.restarts")),
    # the run
    "collector": Effect("torchrl", part("collector")),
    "collector_kwargs": Effect({"fast_policy": "exact"}, part("collector.exact_policy")),
    "seed": Effect(1),
    "device": Effect("cuda", part("collector.policy_device.type")),
    "precision": Effect("bfloat16", weights),
    "threads": Effect(2, lambda run: run.threads),
    "compile": Effect(False, part("update.compile")),
    "logger": Effect("tensorboard", lambda run: [f for f in run.files if "tfevents" in f]),
    "log_dir": Effect("elsewhere", lambda run: {f.split("/")[0] for f in run.files}),
    "resume": Effect("latest", lambda run: sum(f.endswith("config.yaml") for f in run.files)),
    "init_from": Effect("latest"),
    "log_every": Effect(32, lambda run: run.rows),
    "checkpoint_every": Effect(
        32, lambda run: [f for f in run.files if f.endswith("32/manifest.json")]
    ),
    "keep_best": Effect(None, lambda run: sorted(run.trainer.registered_modules)),
    "video_every": Effect(
        64, lambda run: [f for f in run.files if f.endswith(".mp4")], {"steps.evaluation_every": 32}
    ),
    "save_policy": Effect(True, lambda run: [f for f in run.files if "/policy/" in f]),
    "time_limit": Effect(1e-6, counts("iterations")),
    "rank_timeout": Effect(7.0, part("ranks.timeout")),
    "evaluation_seed": Effect(1, part("evaluate.seed")),
    "evaluation_max_steps": Effect(3, part("evaluate.max_steps")),
    "stop_at_return": Effect(-1e9, counts("iterations"), {"steps.evaluation_every": 32}),
    "progress": Effect(True, lambda run: bool(run.shown)),
    # steps
    "steps.total_policy_steps": Effect(128, counts("policy_steps")),
    "steps.steps_per_env": Effect(4, counts("iterations")),
    "steps.frames_per_batch": Effect(
        8, counts("iterations"), {**NO_STEPS, "steps.frames_per_batch": 16}
    ),
    "steps.min_steps": Effect(12, counts("iterations"), {**EPISODES, "steps.min_episodes": 1}),
    "steps.min_episodes": Effect(7, counts("iterations"), {**EPISODES, "steps.min_steps": 1}),
    "steps.evaluation_every": Effect(32, counts("evaluations")),
    "steps.evaluation_episodes": Effect(3, counts("evaluation_episodes")),
    "steps.rounding": Effect("down", counts("policy_steps"), {"steps.total_policy_steps": 65}),
    "steps.update_epochs": Effect(2, counts("gradient_steps")),
    "steps.minibatch_size": Effect(2, counts("samples")),
    "steps.minibatches": Effect(2, counts("gradient_steps"), {"steps.minibatch_size": None}),
    "steps.num_normalization_steps": Effect(
        16, counts("random_policy_steps"), {"env.normalize_observation": True}
    ),
    "steps.learning_starts": Effect(16, counts("gradient_steps")),
    "steps.random_steps": Effect(8, counts("random_policy_steps")),
    "steps.replay_ratio": Effect(2, counts("gradient_steps")),
    "steps.pretrain_steps": Effect(5, counts("gradient_steps")),
    "steps.sequence_length": Effect(2, counts("samples"), {"n_step": 1}),
    # families
    "gamma": Effect(0.5),
    "buffer_size": Effect(32),
    "reward_scale": Effect(0.5),
    "standardize_reward": Effect(True, weights, {"n_step": 1}),
    "n_step": Effect(3, weights, {"n_step": 1}),
    "hindsight": Effect("future", refused),  # without goals
    "store_next_observation": Effect(False, part("buffer.buffer.storage"), {"n_step": 1}),
    "stacked_frames": Effect(2, weights, {"n_step": 1}),
    "buffer_folder": Effect(".", part("buffer.buffer.storage.folder")),
    # networks
    "hidden_sizes": Effect([6]),
    "critic_hidden_sizes": Effect([6], weights, {"shared_backbone": False}),
    "activation": Effect("silu"),
    "shared_backbone": Effect(None),
    "initial_log_std": Effect(-2.0, weights, PENDULUM),
    "squash_actions": Effect(True, weights, PENDULUM),
    "orthogonal": Effect(False),
    "gsde": Effect(True, weights, PENDULUM),
    "gsde_sample_freq": Effect(1, weights, {**PENDULUM, "gsde": True}),
    "gsde_at_warmup": Effect(True, counts("random_policy_steps"), {"gsde": True}),
    "gsde_expln": Effect(True, weights, {"gsde": True, "initial_log_std": 0.5}),
    "noise_type": Effect("ou"),
    "dueling": Effect(None),
    "num_critics": Effect(3),
    # losses
    "clip_epsilon": Effect(1e-4, weights, SEVERAL_EPOCHS),
    "clip_value": Effect(1e-4, weights, SEVERAL_EPOCHS),
    "entropy_coeff": Effect(0.5),
    "critic_coeff": Effect(5.0),
    "critic_loss": Effect("l1"),
    "critic_epochs": Effect(2),
    "critic_minibatch_size": Effect(2, weights, {"critic_epochs": 2}),
    "critic_learning_rate": Effect(0.1, weights, {"critic_epochs": 2}),
    "critic_lr_schedule": Effect("cosine", weights, {"critic_epochs": 2}),
    "critic_max_grad_norm": Effect(1e-3, weights, {"critic_epochs": 2}),
    "normalize_advantage": Effect(None),
    "gae_lambda": Effect(0.1),
    "double_dqn": Effect(False, weights, {"learning_rate": 0.1, "steps.replay_ratio": 2}),
    "policy_noise": Effect(0.9),
    "noise_clip": Effect(0.01),
    "initial_alpha": Effect(0.1),
    "fixed_alpha": Effect(True),
    "target_entropy": Effect(5.0),
    "head": Effect("value"),
    "atoms": Effect(7),
    "support": Effect([0.0, 10.0]),
    "num_quantiles": Effect(5),
    "dropped_quantiles": Effect(1),
    "num_target_critics": Effect(1),
    "dropout": Effect(0.5),
    "noisy": Effect(False),
    "per_alpha": Effect(2.0),
    "per_beta": Effect(1.0, given={"per_alpha": 1.0}),
    # world models
    "size": Effect("tiny"),
    "imagination_horizon": Effect(2),
    "imagination_starts": Effect(1),
    "lmbda": Effect(0.1),
    "free_nats": Effect(0.0),
    "dynamics_coeff": Effect(0.5),
    "representation_coeff": Effect(0.5),
    "replay_critic_coeff": Effect(5.0),
    "warmup_gradient_steps": Effect(100),
    "max_grad_ratio": Effect(1e-4),
    "stored_latents": Effect(None),
    "latents": Effect(3),
    "continuation_coeff": Effect(1.0),
    "divergence_coeff": Effect(1.0),
    "model_learning_rate": Effect(0.05),
    "ensemble": Effect(3),
    "intrinsic_reward_multiplier": Effect(50.0),
    "intrinsic_weight": Effect(0.1, weights, {"extrinsic_weight": 1.0}),
    "extrinsic_weight": Effect(1.0),
    "ensemble_learning_rate": Effect(0.1),
    "steps.exploration_steps": Effect(40),
    "entropy_schedule": Effect("linear", weights, {"entropy_coeff": 0.5}),
    "critic_schedule": Effect("linear"),
    "advantage_norm": Effect("running", weights, {"normalize_advantage": True}),
    "baseline": Effect(False),
    "max_rho": Effect(0.1),
    "max_c": Effect(0.1),
    "recurrent": Effect("gru"),
    "recurrent_size": Effect(5),
    "burn_in": Effect(2),
    "num_particles": Effect(1),
    "clip_schedule": Effect("linear", weights, {**SEVERAL_EPOCHS, "clip_epsilon": 1e-3}),
    # images
    "clip_reward": Effect(False, lambda run: "sign_reward" in run.trainer.registered_modules),
    "preprocess": Effect("atari", refused),
    "frame_stack": Effect(2),
    "convolutions": Effect([[4, 4, 2]]),
    # optimisation
    "optimizer": Effect("adam"),
    "backbone_lr_scale": Effect(0.1, weights, {"shared_backbone": True}),
    "critic_backbone_lr_scale": Effect(0.1, weights, {"shared_backbone": False}),
    "momentum": Effect(0.9),
    "renorm_actor": Effect(True),
    "renorm_warmup": Effect(3),
    "beta_1": Effect(0.99),
    "learning_rate": Effect(0.05),
    "lr_schedule": Effect("cosine"),
    "max_grad_norm": Effect(1e-3),
    "target_kl": Effect(1e-9, counts("skipped_gradient_steps"), SEVERAL_EPOCHS),
    "tau": Effect(0.5),
    "target_update_every": Effect(3, weights, {"tau": 0.5}),
    "policy_delay": Effect(1),
    # data sets
    "steps.gradient_steps": Effect(72, counts("gradient_steps")),
    "steps.gradient_steps_per_iteration": Effect(16, counts("iterations")),
    "dataset": Effect([NAMES[1]]),
    "normalize_data": Effect(False),
    "alpha": Effect(10.0),
    "expectile": Effect(0.9),
    "temperature": Effect(0.5),
    "min_q_weight": Effect(10.0),
    "num_random": Effect(3),
    # exploration
    "epsilon_start": Effect(
        0.1, weights, {"noisy": False, "exploration_share": 1.0, "steps.random_steps": 0}
    ),
    "epsilon_end": Effect(1.0, weights, {"noisy": False}),
    "epsilon_decay": Effect(1.0, weights, {"noisy": False}),
    "exploration_share": Effect(1.0, weights, {"noisy": False}),
    "exploration_noise": Effect(0.9),
    "exploration_epsilon": Effect(0.9, weights, {"env.id": "CartPole-v1"}),
    "exploration_halving": Effect(4.0),
    "exploration_min": Effect(0.2, weights, {"exploration_halving": 0.5}),
}
"""By the name of the setting; the same for all recipes that have it."""

ON_POLICY: dict[str, Effect] = {
    "steps.minibatch_size": Effect(2, counts("gradient_steps")),
    "steps.sequence_length": Effect(2),
    "steps.min_steps": Effect(
        12, counts("iterations"), {**BATCHES_OF_EPISODES, "steps.min_episodes": 1}
    ),
    "steps.min_episodes": Effect(
        7, counts("iterations"), {**BATCHES_OF_EPISODES, "steps.min_steps": 1}
    ),
}
"""Of recipes that train on each sample of a batch equally often."""

OFFLINE: dict[str, Effect] = {
    "env.id": Effect("MountainCarContinuous-v0", refused),
    "env.num_envs": Effect(33, part("evaluate.env.num_envs"), {"steps.evaluation_episodes": 40}),
    "env.vectorization": Effect("async", part("evaluate.env.backend")),
    "env.action_repeat": Effect(2, part("plan.action_repeat")),
    "env.max_episode_steps": Effect(3, part("plan.max_episode_steps")),
    "env.normalize_observation": Effect(True, refused),
    "env.normalize_reward": Effect(True, refused),
    "env.step_timeout": Effect(
        60.0,
        lambda run: run.trainer.evaluate.env.backend._workers[0].step_timeout,
        {"env.vectorization": "async"},
    ),
    "env.kwargs": Effect({"restart_on_error": 3}, part("evaluate.env.backend.restarts")),
    "collector": Effect("torchrl", refused),
    "collector_kwargs": Effect({"reuse": True}, refused),
    "device": Effect("cuda", part("evaluate.device.type")),
}
"""Of recipes that learn from a data set, whose environments only evaluate."""

PARTICLES: dict[str, Effect] = {
    "steps.min_steps": Effect(12, refused),
    "steps.min_episodes": Effect(7, refused),
    "steps.sequence_length": Effect(2, refused),
}
"""Of particles, which collect as many transitions each."""

DISCRETE = {"env.id": Effect("Acrobot-v1"), "target_entropy": Effect(0.9)}
"""Of recipes that choose among actions."""

STEPS = {"steps.steps_per_env": 2, "steps.min_steps": None, "steps.min_episodes": None}
WHOLE_EPISODES = {
    "checkpoint_every": Effect(
        1_000, lambda run: sum(file.endswith("manifest.json") for file in run.files)
    ),
    "collector": Effect("torchrl", refused),
    "collector_kwargs": Effect({"layout": "flat"}, part("collector.layout")),
    "steps.steps_per_env": Effect(4, refused),
    **{
        name: EFFECTS[name]._replace(given={**EFFECTS[name].given, **STEPS})
        for name in ("steps.rounding", "steps.minibatches", "steps.num_normalization_steps")
    },
    # Of the whole batch, sequences are the same rows in the same order.
    "steps.sequence_length": Effect(2, weights, {"steps.minibatch_size": 4}),
}
"""Of recipes that collect whole episodes."""

RECURRENT = {
    "steps.steps_per_env": Effect(4, counts("iterations"), {"steps.minibatch_size": 2}),
    "steps.frames_per_batch": Effect(
        8,
        counts("iterations"),
        {**NO_STEPS, "steps.frames_per_batch": 16, "steps.minibatch_size": 2},
    ),
    "shared_backbone": Effect(False, refused),
    "critic_backbone_lr_scale": Effect(0.1, refused),
    "critic_hidden_sizes": Effect([6], refused),
}
"""Of recipes whose minibatches are sequences."""

IMAGES: dict[str, Effect] = {
    "env.id": Effect("kit/LargeGlimpse-v0"),
    "env.normalize_observation": Effect(True, refused),
    "env.normalize_reward": Effect(None, lambda run: run.trainer.collector.env.needs_raw_reward),
    "steps.num_normalization_steps": Effect(16, refused),
}
"""Of recipes that learn from images of bytes."""
PPO_PIXELS = {"initial_log_std": Effect(-2.0, weights, {"env.id": "kit/Pointing-v0"})}


class Pointing(Glimpse):
    """The same images; the action is a point in the quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,))

    def step(self, action: Any) -> Any:
        row, column = (int(number > 0.0) for number in action)
        return super().step(np.int64(2 * row + column))


gym.register("kit/LargeGlimpse-v0", Glimpse, kwargs={"size": 16})
gym.register("kit/Pointing-v0", Pointing)

WITHOUT_STACKS = (
    "env.action_repeat", "steps.sequence_length", "steps.min_steps", "steps.min_episodes", "n_step",
    "store_next_observation",
)  # fmt: skip
FRAMES: dict[str, Effect] = {
    name: EFFECTS[name]._replace(given={**EFFECTS[name].given, "stacked_frames": 1})
    for name in WITHOUT_STACKS
}
FRAMES["n_step"] = FRAMES["n_step"]._replace(given={**FRAMES["n_step"].given, "clip_reward": False})
FRAMES |= {
    "env.normalize_reward": Effect(None, weights, {"clip_reward": False}),
    "stacked_frames": Effect(2),
    "tau": Effect(0.5, weights, {"target_update_every": 1}),
}
"""Of DQN from images, whose stacks are stored as frames."""

WORLD_MODEL = {"compile": Effect("auto", part("update.compile"))}
"""Of world models, which are not recorded here."""

TRUST_REGION: dict[str, Effect] = {
    "steps.sequence_length": Effect(2, lambda run: run.table),  # the step is of the whole batch
    "steps.update_epochs": Effect(2, refused),
    "steps.minibatch_size": Effect(2, refused),
    "steps.minibatches": Effect(2, refused),
    "max_kl": Effect(0.5),
    "damping": Effect(10.0),
    "conjugate_gradient_steps": Effect(1),
    "line_search_steps": Effect(3, part("update.line_search_steps")),
    "critic_epochs": Effect(2),
    "critic_minibatch_size": Effect(2),
    "critic_learning_rate": Effect(0.1),
    "critic_lr_schedule": Effect("cosine"),
    "critic_max_grad_norm": Effect(1e-3),
    "compile": Effect(
        False, lambda run: run.trainer.registered_modules["fit_critic"].update.compile
    ),
    "learning_rate": Effect(0.05, refused),
    "lr_schedule": Effect("cosine", refused),
    "backbone_lr_scale": Effect(0.1, refused),
    "critic_backbone_lr_scale": Effect(0.1, refused),
    "shared_backbone": Effect(True, refused),
    "critic_coeff": Effect(5.0, refused),
    "critic_schedule": Effect("linear", refused),
}
"""Of trust regions, beside which a critic is fitted."""

OWN = {"on_policy": ON_POLICY, "offline": OFFLINE}
OWN |= {
    "ppo_pixels": IMAGES | PPO_PIXELS,
    "dqn_pixels": IMAGES | FRAMES,
    "svpg": PARTICLES,
    "reinforce": WHOLE_EPISODES,
    "dreamerv3": WORLD_MODEL,
    "plan2explore": {**WORLD_MODEL, "collector": Effect("torchrl", refused)},
    "dreamerv1": WHOLE_EPISODES
    | WORLD_MODEL
    | {
        "collector_kwargs": Effect({"fast_policy": "exact"}, part("collector.exact_policy")),
        "steps.learning_starts": Effect(48, counts("gradient_steps")),
    },
    "ppo_recurrent": RECURRENT,
    "trpo": TRUST_REGION,
}
OWN |= dict.fromkeys(("dqn", "sac_discrete"), DISCRETE)
GSDE = {"initial_log_std": Effect(-2.0, weights, {"gsde": True})}
OWN |= dict.fromkeys(("droq", "redq", "sac", "tqc"), GSDE)
OWN["rainbow"] = {**DISCRETE, "steps.sequence_length": Effect(2, refused)}
"""By family or recipe, where it is another effect than that of others."""

LOSSES = {"ppo": "PPOLoss", "a2c": "ReinforceLoss"}
"""Another loss that fits; for other recipes one derived from their own is made."""


def effect_of(recipe: str, name: str) -> Effect:
    if name == "loss":
        return Effect(LOSSES.get(recipe, f"{__name__}:Other"), losses)
    family = OWN.get(_module(recipe).Config.FAMILY, {})
    effect = {**EFFECTS, **family, **OWN.get(recipe, {})}[name]
    if effect.value is None:  # a flag
        return effect._replace(value=not _settings(recipe)[name])
    return effect


def _module(recipe: str) -> Any:
    return importlib.import_module(f"recipes.{recipe}")


def _settings(recipe: str) -> dict[str, Any]:
    """The settings of a small run by dotted name."""
    values = small_config(_module(recipe).Config)
    found = {}
    for path, _ in leaves_of(_module(recipe).Config):
        found[".".join(path)] = functools.reduce(lambda group, key: group[key], path, values)
    return found


def outcome(recipe: str, folder: Path, settings: dict[str, Any], capsys: Any) -> Outcome:
    """Run a recipe in a folder."""
    values: dict[str, Any] = small_config(_module(recipe).Config)
    for name, value in settings.items():
        *groups, last = name.split(".")
        functools.reduce(lambda group, key: group[key], groups, values)[last] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("kit.experiment.read_datasets", read_stored)
        patch.setattr("kit.hooks.curve.draw_curve", lambda *_: None)  # most of the time of a run
        capsys.readouterr()
        trainer = _module(recipe).build(from_plain(_module(recipe).Config, values))
        ledger = trainer.run()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    state = trainer.loss_module.state_dict()
    return Outcome(
        [[name, value.tolist()] for name, value in state.items()],
        ledger.counters(),
        trainer.plan.table(),
        files,
        sum(len(path.read_text().splitlines()) for path in folder.rglob("metrics.csv")),
        trainer,
        trainer.numbers.threads,
        capsys.readouterr().out,
    )


def derive_loss(recipe: str) -> None:
    """Make ``Other``, the same loss as the recipe's by another name."""
    name = _module(recipe).Config().loss
    name = {"bc": "BCLoss", "rainbow": "kit.losses:CategoricalDQNLoss"}.get(recipe, name)
    globals()["Other"] = type("Other", (resolve(name),), {})


WRITES = (
    "logger", "log_dir", "resume", "init_from", "log_every", "checkpoint_every", "video_every",
    "save_policy",
)  # fmt: skip
"""Settings of what a run writes; the others are tried without a run folder."""
BEFORE: dict[tuple[str, str], Outcome] = {}
"""Runs without a change, by recipe and other settings."""


def differs(recipe: str, name: str, tmp_path: Path, capsys: Any) -> bool:
    """Whether a run with a changed setting differs from one without where it should."""
    effect = effect_of(recipe, name)
    if name == "loss":
        derive_loss(recipe)
    known = _settings(recipe)
    if effect.look is refused:
        said = {"env.id": "dataset", "steps.minibatches": "minibatch_size"}
        with pytest.raises(SettingError, match=said.get(name, name.split(".")[-1])):
            outcome(recipe, tmp_path, {name: effect.value}, capsys)
        return True
    given = {key: value for key, value in effect.given.items() if key in known}
    given |= {"log_dir": "runs"} if name in WRITES else {}
    if name == "resume":
        first, second = (
            effect.look(outcome(recipe, tmp_path, {**given, **more}, capsys))
            for more in ({}, {name: effect.value})
        )
        return bool(first == second)
    if name == "init_from":  # the run before
        runs = [
            outcome(recipe, tmp_path, {**given, **more}, capsys)
            for more in ({}, {name: effect.value})
        ]
        return bool(effect.look(runs[0]) != effect.look(runs[1]))
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir(), after.mkdir()
    if (recipe, str(given)) not in BEFORE:
        BEFORE[recipe, str(given)] = outcome(recipe, before, given, capsys)
    changed = outcome(recipe, after, {**given, name: effect.value}, capsys)
    return bool(effect.look(BEFORE[recipe, str(given)]) != effect.look(changed))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_has_entry(recipe):
    for name in _settings(recipe):
        assert effect_of(recipe, name)


CASES = [(recipe, name) for recipe in RECIPES for name in _settings(recipe)]


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_setting_has_expected_effect(recipe, name, tmp_path, capsys):
    if name == "device" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name == "logger":
        pytest.importorskip("tensorboard")
    assert differs(recipe, name, tmp_path, capsys)
