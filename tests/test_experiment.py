"""One owner of what surrounds an algorithm: the same in a notebook, a script and a recipe."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adam
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import MultiStepTransform
from torchrl.objectives import ClipPPOLoss, PPOLoss, SACLoss, SoftUpdate

import recipes.a2c
import recipes.ddpg
import recipes.ppo
import recipes.reinforce
import recipes.sac
from kit.advantages import GAE
from kit.buffers import PrioritizedSampler, make_replay_buffer
from kit.collectors import VectorCollector
from kit.dialects import SB3
from kit.envs import make_env
from kit.experiment import (
    EnvConfig,
    Experiment,
    OffPolicySteps,
    OnPolicyConfig,
    OnPolicySteps,
    seed_everything,
)
from kit.hooks import AnnealLearningRate, Evaluator, StopWhen, TargetKL
from kit.modules import make_action_value, make_actor, make_value
from kit.runs.recipe import Recipe
from kit.steps import SettingError, StepPlan
from kit.trainer import Trainer
from kit.update import Update
from tests.errors import raises_setting
from tests.test_own_recipe import documented
from tests.tiny import assert_equal, weights

ON = {
    "total_policy_steps": 64, "steps_per_env": 8, "update_epochs": 2, "minibatch_size": 8,
    "evaluation_every": None, "evaluation_episodes": 2,
}  # fmt: skip
OFF = {
    "total_policy_steps": 60, "learning_starts": 20, "minibatch_size": 8,
    "evaluation_every": None, "evaluation_episodes": 2,
}  # fmt: skip
EXACT = {"fast_policy": "exact"}
RECIPES = (recipes.ppo, recipes.sac, recipes.a2c, recipes.reinforce)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def quiet(config_class: Any, **settings: Any) -> Any:
    """Settings of a short run that writes nothing."""
    on = issubclass(config_class, OnPolicyConfig)
    usual: dict[str, Any] = {"steps": OnPolicySteps(**ON) if on else OffPolicySteps(**OFF)}
    usual |= {"hidden_sizes": [8]} if hasattr(config_class, "activation") else {}
    usual |= {"env": EnvConfig(num_envs=2)} if on else {}
    return config_class(**{**usual, "log_dir": None, "progress": False, **settings})


def ppo(**settings: Any) -> recipes.ppo.Config:
    return quiet(recipes.ppo.Config, **settings)


def sac(**settings: Any) -> recipes.sac.Config:
    return quiet(recipes.sac.Config, **settings)


def ddpg(**settings: Any) -> recipes.ddpg.Config:
    return quiet(recipes.ddpg.Config, **settings)


def refused(build: Any, *arguments: Any, **keywords: Any) -> str:
    """The one line in which something is refused."""
    with pytest.raises(SettingError) as raised:
        build(*arguments, **keywords)
    message = str(raised.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------- how recipes read
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipe_module_and_build_stay_short(recipe):
    assert len(inspect.getsource(recipe).splitlines()) <= 110
    assert len(inspect.getsource(recipe.build).splitlines()) <= 35


# ---------------------------------------------------------------------- in a notebook
@pytest.mark.parametrize("config", [ppo(), sac()], ids=["on-policy", "off-policy"])
def test_run_writes_nothing_without_log_dir(config, tmp_path):
    recipe = recipes.ppo if isinstance(config, OnPolicyConfig) else recipes.sac
    trainer = recipe.build(config)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert trainer.folder is None
    assert "evaluation/return" in trainer.journal.latest
    assert list(tmp_path.iterdir()) == []


def test_build_rejects_logger_without_log_dir():
    message = refused(recipes.ppo.build, ppo(logger="tensorboard"))
    assert message.startswith(
        "logger='tensorboard': It has no effect because the run has no folder"
    )


def test_build_rejects_resume_without_log_dir():
    message = refused(recipes.ppo.build, ppo(resume="runs/ppo/CartPole-v1/20251201-093000-s0"))
    assert "but log_dir=null disables run folders. Remove log_dir=null" in message


# ---------------------------------------------------------------------- as if wired by hand
def assert_same_run(one: Trainer, other: Trainer) -> None:
    assert one.ledger.counters() == other.ledger.counters()
    assert_equal(weights(one), weights(other))
    assert one.journal.latest["evaluation/return"] == other.journal.latest["evaluation/return"]


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_ppo_matches_manual_wiring_bitwise(id):
    env_config = EnvConfig(id, num_envs=2, normalize_observation=True, normalize_reward=True)
    cfg = ppo(env=env_config, collector_kwargs=EXACT, seed=3, target_kl=0.05)
    seed_everything(3)
    plan = StepPlan(num_envs=2, **ON)
    normalized = {"normalize_observation": True, "normalize_reward": True}
    env = make_env(id, 2, **normalized, seed=3, gamma=0.99)
    test_env = make_env(id, 2, **normalized)
    test_env.normalizer = env.normalizer
    actor, critic = make_actor(env, (8,)), make_value(env, (8,))
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5,
        normalize_advantage=True, loss_critic_type="l2",
    )  # fmt: skip
    loss.make_value_estimator(gamma=0.99, lmbda=0.95)
    optimizer = Adam(loss.parameters(), lr=5e-4, eps=1e-5, fused=True)
    by_hand = Trainer(
        plan,
        collector=VectorCollector(
            env, actor, frames_per_batch=16, total_frames=64, seed=3, fast_policy="exact"
        ),
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        update=Update(loss, optimizer, max_grad_norm=0.5),
        evaluate=Evaluator(test_env, actor, episodes=2, seed=3, **EXACT),
        hooks=[AnnealLearningRate(optimizer, "linear"), TargetKL(0.05)],
        progress=False,
    )
    by_hand.run()
    other = recipes.ppo.build(cfg)
    other.run()
    assert_same_run(by_hand, other)


def test_sac_matches_manual_wiring_bitwise():
    cfg = sac(collector_kwargs=EXACT, seed=3, n_step=2)
    seed_everything(3)
    plan = StepPlan(num_envs=1, **OFF, steps_per_env=1, replay_ratio=1)
    env, test_env = make_env("Pendulum-v1", seed=3), make_env("Pendulum-v1", 2)
    actor = make_actor(
        env, (8,), "relu", continuous="tanh_normal", orthogonal=False, return_log_prob=False
    ).select_out_keys("action")
    loss = SACLoss(
        actor, make_action_value(env, (8,)), target_entropy=-1.0, loss_function="l2"
    )  # fmt: skip
    loss.make_value_estimator(gamma=0.99)
    by_hand = Trainer(
        plan,
        collector=VectorCollector(
            env, actor, frames_per_batch=1, total_frames=60, seed=3, fast_policy="exact",
            init_random_frames=20,
        ),
        buffer=make_replay_buffer(1_000_000, 8, n_step=2, gamma=0.99),
        update=Update(
            loss,
            Adam(loss.parameters(), lr=1e-3, fused=True),
            target_updater=SoftUpdate(loss, tau=0.005),
        ),
        evaluate=Evaluator(test_env, actor, episodes=2, seed=3, **EXACT),
        progress=False,
    )  # fmt: skip
    by_hand.run()
    other = recipes.sac.build(cfg)
    other.run()
    assert_same_run(by_hand, other)


# ---------------------------------------------------------------------- one of each
def test_documented_recipe_shares_normalizer_with_evaluation(tmp_path):
    file = tmp_path / "my_a2c.py"
    file.write_text(documented())
    recipe = Recipe(str(file)).load()
    env = EnvConfig(num_envs=2, normalize_observation=True)
    trainer = recipe.build(quiet(recipe.Config, env=env))
    trainer.run()
    normalizer = trainer.collector.env.normalizer
    assert trainer.evaluate.env.normalizer is normalizer
    (learned,) = [v for k, v in normalizer.state_dict().items() if k.startswith("observation")]
    assert learned["count"] > 60


def test_device_setting_reaches_buffer_collector_and_evaluator():
    cfg = sac(device="cpu:0")  # told apart from the default, and there on every machine
    trainer = recipes.sac.build(cfg)
    there = torch.device("cpu:0")
    assert trainer.evaluate.device == there
    assert trainer.replay_buffer.storage.device == there
    assert trainer.collector.storing_device == there


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipe_trains_and_evaluates_on_gpu(recipe):
    trainer = recipe.build(quiet(recipe.Config, device="cuda"))
    assert trainer.run().compare(trainer.plan) == []
    assert next(trainer.loss_module.parameters()).device.type == "cuda"
    assert trainer.journal.latest["evaluation/length"] > 0


def test_env_wrappers_are_applied_inside_recipe_wrappers():
    names = ["gymnasium.wrappers:FlattenObservation",
             {"gymnasium.wrappers:RescaleObservation": {"min_obs": 0, "max_obs": 1}}]  # fmt: skip
    config = recipes.ppo.Config(log_dir=None, progress=False)
    config.env = EnvConfig(id="MountainCar-v0", wrappers=names)
    env = recipes.ppo.build(config).collector.env
    assert env.observation_leaves[0].space.high.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["missing_package:Wrapper", "gymnasium.wrappers:Missing", "Plain"])
def test_env_wrappers_that_cannot_be_imported_are_rejected(name):
    config = recipes.ppo.Config(log_dir=None, progress=False)
    config.env.wrappers = [name]
    with raises_setting("env.wrappers", name):
        recipes.ppo.build(config)


def test_gamma_reaches_rewards_advantages_targets_and_n_step():
    env = EnvConfig(num_envs=2, normalize_reward=True)
    trainer = recipes.ppo.build(ppo(gamma=0.5, env=env))
    assert trainer.collector.env.normalizer.gamma == 0.5
    assert float(trainer.advantage.gamma) == 0.5
    other = recipes.sac.build(sac(gamma=0.5, n_step=3))
    assert float(other.loss_module.value_estimator.gamma) == 0.5
    assert other.buffer.n_step.gamma == 0.5


# ---------------------------------------------------------------------- losses
class Bolder(ClipPPOLoss):
    """Passes on what it is given."""

    def __init__(self, actor, critic, **kwargs):
        super().__init__(actor, critic, **kwargs)


@pytest.mark.parametrize(
    "swap",
    [
        {"config": {"loss": "torchrl.objectives:ClipPPOLoss"}},
        {"make_loss": ClipPPOLoss},
        {"make_loss": Bolder},
        {"make_loss": "ClipPPOLoss"},
        {"config": {"loss": f"{__name__}:Bolder"}},
        {"make_loss": lambda actor, critic, **arguments: ClipPPOLoss(actor, critic, **arguments)},
    ],
    ids=["full name", "class", "subclass", "name", "name of a subclass", "function"],
)
def test_replaced_loss_receives_recipe_settings(swap):
    config = ppo(clip_epsilon=0.4, entropy_coeff=0.25, **swap.pop("config", {}))
    loss = recipes.ppo.build(config, **swap).loss_module
    assert float(loss.clip_epsilon) == pytest.approx(0.4)
    assert float(loss.entropy_coeff) == 0.25
    assert loss.loss_critic_type == "l2"


def test_build_leaves_running_advantage_moments_unchanged():
    config = ppo(advantage_norm="running", loss=f"{__name__}:Bolder")
    advantage = recipes.ppo.build(config).advantage
    assert advantage.standardizer.count == 0


class OwnSAC(SACLoss):
    """Draws the initial weights of its critics, as TorchRL's does."""


class OneStep(SACLoss):
    """Discounts whatever was joined by one step."""

    def forward(self, batch):
        return super().forward(batch.exclude("steps_to_next_obs"))


def test_build_rejects_n_step_when_loss_ignores_step_count():
    with raises_setting("n_step"):
        recipes.sac.build(sac(n_step=3), make_loss=OneStep)
    recipes.sac.build(sac(n_step=1), make_loss=OneStep)


def test_loss_subclass_trains_same_weights():
    numbers = []
    for loss in ("SACLoss", f"{__name__}:OwnSAC"):
        config = recipes.sac.Config(loss=loss, log_dir=None, progress=False)
        config.steps.total_policy_steps, config.steps.evaluation_every = 1_016, None
        trainer = recipes.sac.build(config)
        trainer.run()
        numbers.append([value.clone() for value in trainer.loss_module.parameters()])
    assert all(map(torch.equal, *numbers))


def test_build_rejects_changed_setting_unsupported_by_loss():
    assert isinstance(recipes.ppo.build(ppo(), make_loss=PPOLoss).loss_module, PPOLoss)
    message = refused(recipes.ppo.build, ppo(clip_epsilon=0.4, loss="PPOLoss"))
    assert message == (
        "clip_epsilon=0.4: The loss PPOLoss does not accept this setting. Remove it, or use a "
        "loss that accepts it, such as ClipPPOLoss."
    )


def test_build_rejects_loss_with_incompatible_signature():
    assert "TypeError: system() takes" in refused(recipes.ppo.build, ppo(loss="os:system"))


# ---------------------------------------------------------------------- other parts
def test_build_replaces_parts_and_adds_hooks():
    class MyCollector(VectorCollector):
        pass

    gae = GAE(gamma=0.99, lmbda=0.5, value_network=None)
    stop = StopWhen("evaluation/return", reached=0)
    trainer = recipes.ppo.build(ppo(), collector=MyCollector, advantage=gae, hooks=[stop])
    assert type(trainer.collector) is MyCollector
    assert trainer.advantage is gae
    assert {"stop_when", "anneal_learning_rate"} <= set(trainer.registered_modules)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"advantag": 1}, "advantag=1: A trainer has no such part. Try: advantage"),
        ({"loss": PPOLoss}, "A trainer has no such part. Use make_loss=..., or Config(loss=...)"),
        ({"folder": "here"}, "folder='here': A trainer has no such part"),
    ],
)
def test_build_rejects_unknown_part(part, message):
    assert message in refused(recipes.ppo.build, ppo(), **part)


# ---------------------------------------------------------------------- settings in Python
@pytest.mark.parametrize(
    ("recipe", "config", "message"),
    [
        (recipes.ppo, lambda: ppo(env={"id": "CartPole-v1"}),
         "env={'id': 'CartPole-v1'}: A group of settings is expected. Use env=EnvConfig(...), or"),
        (recipes.ppo, lambda: ppo(env=None), "env=None: A group of settings is expected"),
        (recipes.ppo, lambda: ppo(seed=10**400), "seed=1"),
        (recipes.ppo, lambda: ppo(steps={"update_epochs": 3}),
         "steps={'update_epochs': 3}: A group of settings is expected. Use steps=OnPolicySteps("),
        (recipes.ppo, lambda: ppo(steps=OffPolicySteps()), "Use steps=OnPolicySteps(...)"),
        (recipes.sac, lambda: sac(steps=OnPolicySteps()), "Use steps=OffPolicySteps(...)"),
        (recipes.ppo, lambda: ppo(steps=StepPlan(total_policy_steps=64, replay_ratio=1)),
         ": This recipe is on-policy. Use update_epochs."),
        (recipes.sac, lambda: sac(steps=StepPlan(num_envs=1, **ON)),
         ": This recipe is off-policy. Use replay_ratio."),
        (recipes.ppo, lambda: ppo(learning_rate=-1),
         "learning_rate=-1.0: The value must be above 0."),
    ],
)  # fmt: skip
def test_build_rejects_invalid_settings(recipe, config, message):
    made = config() if callable(config) else config
    assert message in refused(recipe.build, made)


@pytest.mark.parametrize(
    "steps",
    [StepPlan(num_envs=2, **ON), SB3(n_envs=2, n_steps=8, total_timesteps=64)],
    ids=lambda steps: type(steps).__name__,
)
def test_run_starts_and_resumes_with_plan_or_dialect_steps(steps, tmp_path):
    config = ppo(steps=steps, log_dir=str(tmp_path))
    trainer = recipes.ppo.build(config)
    assert trainer.run().policy_steps == 64
    config.resume = str(trainer.folder)
    assert recipes.ppo.build(config).ledger.policy_steps == 64


@pytest.mark.parametrize(
    "change", [{"action_repeat": 2}, {"max_episode_steps": 7}, {"num_envs": 4}], ids=str
)
def test_experiment_rejects_env_that_contradicts_settings(change):
    env = EnvConfig(num_envs=2, max_episode_steps=9)
    experiment = Experiment(ppo(env=env), algorithm="ppo")
    made = experiment.make_env(**change)
    ((field, value),) = change.items()
    message = refused(experiment.trainer, made, make_actor(made))
    assert message.startswith(f"env.{field}={value} ")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"compile": False},
            "compile=False: The recipe created its update with compile=auto. Use Update(",
        ),
        (
            {"precision": "bfloat16"},
            "precision='bfloat16': The recipe's loss PPOLoss ignores this setting",
        ),
    ],
)
def test_custom_recipe_rejects_unused_setting(setting, message):
    def build(**changes: Any) -> Trainer:
        experiment = Experiment(quiet(OnPolicyConfig, **changes), algorithm="ppo")
        env = experiment.make_env()
        actor, critic = make_actor(env), make_value(env)
        loss = PPOLoss(actor, critic)
        update = Update(loss, Adam(loss.parameters()))
        return experiment.trainer(
            env, actor, advantage=GAE(gamma=0.9, value_network=critic), update=update
        )

    build().shutdown()
    assert refused(build, **setting).startswith(message)


@pytest.mark.parametrize(
    "buffer",
    [make_replay_buffer(100, 8), TensorDictReplayBuffer(storage=LazyTensorStorage(100))],
    ids=["the kit's", "TorchRL's"],
)
def test_build_rejects_buffer_that_contradicts_settings(buffer):
    for setting in ({"n_step": 3}, {"per_alpha": 0.6}, {"buffer_size": 9}):
        with raises_setting(min(setting)):
            recipes.sac.build(sac(**setting), buffer=buffer)
    recipes.sac.build(sac(buffer_size=100), buffer=buffer)


def test_build_checks_multi_step_transform_of_custom_buffer():
    def joining():
        transform = MultiStepTransform(3, 0.9)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)

    message = refused(recipes.sac.build, sac(n_step=3), buffer=joining())
    assert message.startswith("gamma=0.9 of NStep differs from gamma=0.99 of SACLoss")
    recipes.sac.build(sac(n_step=3, gamma=0.9), buffer=joining())
    settings = sac(n_step=3, gamma=0.9)
    message = refused(recipes.sac.build, settings, make_loss=OneStep, buffer=joining())
    assert message.startswith("n_step=3: The loss OneStep does not read steps_to_next_obs")


def prioritized(alpha):
    return make_replay_buffer(100, 8, sampler=PrioritizedSampler(100, alpha, beta=0.4))


def test_build_checks_per_alpha_of_custom_buffer():
    with raises_setting("per_alpha"):
        recipes.sac.build(sac(per_alpha=0.6), buffer=prioritized(0.7))
    recipes.sac.build(sac(per_alpha=0.7), buffer=prioritized(0.7))
    message = refused(recipes.ddpg.build, ddpg(per_alpha=0.6), buffer=prioritized(0.6))
    assert message.startswith("per_alpha=0.6: It has no effect because a replay buffer")
    recipes.ddpg.build(ddpg(per_alpha=1.2), buffer=prioritized(0.6))


@pytest.mark.parametrize(
    "settings",
    [
        {"store_next_observation": False},
        {"buffer_folder": "."},
        {"per_beta": 0.5, "per_alpha": 0.6},
    ],
)
def test_build_rejects_buffer_settings_with_custom_buffer(settings):
    setting, value = next(iter(settings.items()))
    message = refused(recipes.sac.build, sac(**settings), buffer=prioritized(0.6))
    assert message.startswith(f"{setting}={value!r}: It has no effect because a replay buffer")


def test_saved_run_allocates_no_buffer_and_starts_no_process(tmp_path):
    import multiprocessing

    from kit.evaluate import SavedRun

    env = EnvConfig("Pendulum-v1", num_envs=1, vectorization="async")
    trainer = recipes.sac.build(sac(env=env, collector="async", log_dir=str(tmp_path)))
    trainer.run()
    before = set(multiprocessing.active_children())
    run = SavedRun(Path(str(trainer.folder)))
    assert not run.trainer.replay_buffer.storage.initialized
    assert type(run.trainer.collector) is VectorCollector
    assert set(multiprocessing.active_children()) - before == set()
    run.close()


# ---------------------------------------------------------------------- precision
@pytest.mark.parametrize("recipe", [recipes.ppo, recipes.a2c, recipes.sac])
def test_bfloat16_steps_match_eager_and_keep_float32_weights(recipe):
    def trained(**settings):
        config = recipe.Config(log_dir=None, progress=False, **settings)
        config.steps.total_policy_steps, config.steps.evaluation_every = 2_560, None
        if recipe is recipes.sac:
            config.steps.total_policy_steps = 1_024
        trainer = recipe.build(config)
        trainer.run()
        assert bool(trainer.update.plain_reason) == ("compile" in settings)
        return [*trainer.loss_module.parameters()]

    recorded, eager = (trained(precision="bfloat16", **how) for how in ({}, {"compile": False}))
    assert {weight.dtype for weight in recorded} == {torch.float32}
    assert all(map(torch.equal, recorded, eager))
    assert not all(map(torch.equal, recorded, trained()))
