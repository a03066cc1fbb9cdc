"""Every off-policy recipe counts exactly, resumes exactly, and takes the fast path unchanged."""

from __future__ import annotations

import copy
import functools
import importlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.optim import Adam
from torchrl import objectives
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from kit.buffers import ObservationStorage, PrioritizedSampler, make_replay_buffer
from kit.config import EnvConfig
from kit.dialects import Tianshou
from kit.experiment import Experiment
from kit.hooks import Anneal
from kit.losses import DQNLoss
from kit.modules import make_actor
from kit.modules.exploration import EpsilonGreedy
from kit.steps import Piecewise, SettingError
from kit.steps.settings import OffPolicySteps
from kit.trainer import Trainer
from kit.update import Update
from recipes import dqn
from tests.errors import raises_setting
from tests.tiny import Uneven, assert_equal, weights

RECIPES = [
    "dqn", "rainbow", "sac_discrete", "ddpg", "td3", "sac", "redq", "droq", "tqc", "crossq",
]  # fmt: skip


def built(name: str, folder: Path | None = None, **changes: Any) -> Trainer:
    """A run of 120 policy steps, which learns from the 40th on, 3 gradient steps for 2 of them."""
    recipe = importlib.import_module(f"recipes.{name}")
    steps = OffPolicySteps(
        total_policy_steps=120, steps_per_env=1, learning_starts=40, replay_ratio="3/2",
        minibatch_size=8, evaluation_every=None, evaluation_episodes=1,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "steps": steps, "hidden_sizes": [8, 8], "buffer_size": 100, "progress": False,
        "log_dir": None if folder is None else str(folder), "checkpoint_every": 10,
    }  # fmt: skip
    make = changes.pop("make", recipe.build)
    config = recipe.Config(**{**settings, **changes})
    config.env.max_episode_steps = 15
    return make(config)


@pytest.mark.parametrize("name", RECIPES)
def test_loss_discounts_next_value_by_joined_step_count(name):
    trainer = built(name, n_step=3)
    trainer.run()
    loss, rows = trainer.loss_module, trainer.replay_buffer.sample()
    found = []
    for gamma, steps in ((0.9, 3), (0.9**3, 1)):
        loss.make_value_estimator(gamma=gamma)
        rows["steps_to_next_obs"] = torch.full_like(rows["steps_to_next_obs"], steps)
        torch.manual_seed(0)
        losses = loss(rows.clone())
        found.append([losses[name] for name in OF_VALUES if name in losses.keys()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_build_warns_when_learning_starts_equals_run_length():
    steps = OffPolicySteps(total_policy_steps=120, learning_starts=120, minibatch_size=8)
    with pytest.warns(UserWarning, match="is the length of .* 1 gradient step at the end"):
        built("sac", steps=steps)


def test_redq_loss_uses_initial_alpha_in_sac_recipe():
    trainer = built("sac", loss="kit.losses:REDQLoss", initial_alpha=0.03, fixed_alpha=True)
    trainer.run()
    assert trainer.journal.latest["train/alpha"] == pytest.approx(0.03)


@pytest.mark.parametrize("initial", [0.03, 20.0])
def test_build_rejects_initial_alpha_outside_loss_bounds(initial):
    with raises_setting("initial_alpha"):
        built("sac", loss="REDQLoss", initial_alpha=initial)


OF_VALUES = ["loss", "loss_value", "loss_qvalue"]


# ---------------------------------------------------------------------- priorities
def prioritized(name: str, beta: float, **changes: Any) -> Trainer:
    """The same run, from a buffer that is sampled by priority."""
    recipe = importlib.import_module(f"recipes.{name}")
    sampler = PrioritizedSampler(100, alpha=0.6, beta=beta)
    changes["make"] = functools.partial(
        recipe.build, buffer=make_replay_buffer(100, 8, sampler=sampler)
    )
    return built(name, n_step=1, **changes)


@pytest.mark.parametrize("name", sorted({*RECIPES} - {"rainbow"}))
def test_losses_are_means_weighted_by_priority_weight(name):
    trainer = prioritized(name, beta=0.4)
    trainer.run()
    loss, rows = trainer.loss_module, trainer.replay_buffer.sample()
    found, state = [], copy.deepcopy(loss.state_dict())
    for weights_of_rows in ([1.0, 3.0], [1.0, 0.0], [0.0, 1.0]):
        rows["priority_weight"] = torch.tensor(weights_of_rows).repeat_interleave(4)
        loss.load_state_dict(state)  # batch normalisation has running statistics
        torch.manual_seed(0)
        losses = loss(rows.clone())
        found.append(losses.select(*[key for key in losses.keys() if key.startswith("loss")]))
    weighed, first, second = found
    torch.testing.assert_close((first + 3 * second) / 4, weighed, rtol=1e-4, atol=1e-5)
    assert all(bool(first[key] != second[key]) for key in first.keys())


@pytest.mark.parametrize(("name", "torchrls"), [("redq", "REDQLoss"), ("td3", "TD3Loss")])
def test_td_error_is_absolute_when_torchrl_writes_squares(name, torchrls):
    trainer, other = built(name), built(name, loss=torchrls)
    trainer.run()
    other.loss_module.load_state_dict(trainer.loss_module.state_dict())
    rows = trainer.replay_buffer.sample()
    squared = rows.clone()
    for loss, minibatch in ((trainer.loss_module, rows), (other.loss_module, squared)):
        torch.manual_seed(0)
        loss(minibatch)
    torch.testing.assert_close(rows["td_error"].square(), squared["td_error"])


@pytest.mark.parametrize("name", RECIPES)
def test_per_alpha_enables_prioritized_sampling(name):
    trainer = built(name, per_alpha=0.6)
    sampler = trainer.replay_buffer.sampler
    squares = name in ("dqn", "ddpg")  # half the exponent of a square is the same
    assert (sampler._alpha, sampler.beta) == (0.3 if squares else 0.6, 0.4)
    assert trainer.run().gradient_steps
    assert sampler.beta == 1


@pytest.mark.parametrize(("name", "loss"), [("td3", "TD3BCLoss"), ("dqn", "DiscreteCQLLoss")])
def test_sampler_halves_alpha_for_torchrl_offline_losses(name, loss):
    trainer = built(name, loss=loss, per_alpha=0.6, per_beta=0.0)
    assert trainer.replay_buffer.sampler._alpha == 0.3  # TorchRL's write the square


def test_sampler_adapts_alpha_to_base_of_custom_loss():
    class OnTorchRLs(objectives.DQNLoss):
        pass

    class OnTheKits(DQNLoss):
        pass

    for loss, alpha in ((OnTorchRLs, 0.3), (OnTheKits, 0.6)):
        make = functools.partial(dqn.build, make_loss=loss)
        trainer = built("dqn", make=make, per_alpha=0.6)
        assert trainer.replay_buffer.sampler._alpha == alpha


def test_build_rejects_per_alpha_with_sequences():
    steps = OffPolicySteps(total_policy_steps=120, learning_starts=40, sequence_length=2)
    with raises_setting("per_alpha"):
        built("sac", steps=steps, per_alpha=0.6)


def test_per_beta_reaches_sampler_and_requires_per_alpha():
    trainer = built("sac", per_alpha=0.6, per_beta=0.0)
    trainer.run()
    assert trainer.replay_buffer.sampler.beta == 0
    with raises_setting("per_beta"):
        built("sac", per_beta=1.0)


def test_build_rejects_beta_when_loss_ignores_weights():
    with raises_setting("beta"):
        prioritized("crossq", beta=0.4, loss="CrossQLoss")
    assert prioritized("crossq", beta=0.0, loss="CrossQLoss").run().gradient_steps


@pytest.mark.parametrize("noisy", [True, False])
def test_rainbow_uses_noisy_weights_or_epsilon_greedy(noisy):
    trainer = built("rainbow", noisy=noisy)
    assert any("weight_sigma" in name for name in trainer.loss_module.state_dict()) == noisy
    random = [m for m in trainer.collector.policy.modules() if isinstance(m, EpsilonGreedy)]
    assert len(random) == (not noisy)


@pytest.fixture
def uneven():
    id = "tests/Uneven-v0"
    gym.register(id, Uneven)
    yield id
    del gym.registry[id]


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_noise_scales_with_half_range_of_each_action_dimension(name, uneven):
    env = EnvConfig(id=uneven, num_envs=2)
    settings = {"env": env, "hidden_sizes": [8], "exploration_noise": 0.5}
    fast, plain = (built(name, **settings, compile=compile) for compile in ("exact", False))
    halves = torch.tensor(Uneven.HALF_RANGES)
    sigma, std = fast.collector.policy[1].sigma, fast.collector.policy[1].std
    assert torch.equal(sigma * std, 0.5 * halves)
    if name == "td3":
        assert torch.equal(fast.loss_module.policy_noise, 0.2 * halves)
        assert torch.equal(fast.loss_module.noise_clip, 0.5 * halves)
    fast.run()
    plain.run()
    assert fast.update.plain_reason == ""
    assert_equal(weights(fast), weights(plain))


def test_td3_delays_actor_and_target_updates():
    trainer = built("td3", policy_delay=3)
    state, moved = trainer.loss_module.state_dict(), []
    before = {name: value.clone() for name, value in state.items()}

    def look() -> None:
        after = trainer.loss_module.state_dict()
        changed = [name for name in after if not torch.equal(after[name], before[name])]
        before.update((name, value.clone()) for name, value in after.items())
        moved.append({part for part in PARTS if any(name.startswith(part) for name in changed)})

    trainer.register_op("post_optim", look)
    trainer.run()
    critic = {"qvalue_network_params"}
    assert moved[:6] == [critic, critic, PARTS, critic, critic, PARTS]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_crossq_actor_statistics_count_only_actor_updates(precision):
    trainer = built("crossq", renorm_actor=True, policy_delay=3, precision=precision)
    trainer.run()
    state = trainer.loss_module.actor_network_params.flatten_keys(".")
    seen = {int(state[name]) for name in state.keys() if name.endswith("batches")}
    assert seen == {trainer.update.optimizer_steps["actor"]} == {40}


PARTS = {
    "actor_network_params", "qvalue_network_params",
    "target_actor_network_params", "target_qvalue_network_params",
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_steps_match_eager_pytorch_bitwise(name):
    fast = built(name)
    ledger = fast.run()
    assert (ledger.policy_steps, ledger.gradient_steps, ledger.samples) == (120, 121, 121 * 8)
    assert fast.update.plain_reason == ""
    delay = getattr(fast.update.groups[-1], "period", 1)
    assert [*fast.update.optimizer_steps.values()][-1] == 121 // delay
    random_numbers = torch.get_rng_state()
    eager = built(name, compile=False)
    eager.run()
    assert_equal(weights(fast), weights(eager))
    assert torch.equal(random_numbers, torch.get_rng_state())


@pytest.mark.parametrize(
    "extensions",
    [
        {"head": "quantile"},
        {"head": "value", "noisy": False},
        {"head": "value", "noisy": False, "loss": "DQNLoss"},
        {"head": "value", "per_alpha": 0.0},
    ],
    ids=str,
)
def test_rainbow_runs_without_each_extension(extensions):
    trainer = built("rainbow", **extensions)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert trainer.update.plain_reason == ""


@pytest.mark.parametrize("name", RECIPES)
def test_resumed_run_matches_uninterrupted_run(name, tmp_path):
    whole = built(name)
    whole.run()
    broken = built(name, tmp_path)
    broken.register_op(
        "post_steps", lambda: broken.request_stop() if broken.policy_steps == 70 else None
    )
    broken.run()
    resumed = built(name, tmp_path, seed=0, resume=str(broken.folder))
    resumed.run()
    assert resumed.ledger.counters() == whole.ledger.counters()
    assert_equal(weights(resumed), weights(whole))


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("redq", {"num_critics": 3, "num_target_critics": 3}, "num_target_critics=3: .*Try: 2"),
        ("tqc", {"dropped_quantiles": 25}, "dropped_quantiles=25: .*Try: 24"),
        ("tqc", {"dropped_quantiles": -1}, "dropped_quantiles=-1.*at least 0"),
        ("droq", {"dropout": 1.5}, "dropout=1.5: The value must be at least 0"),
        ("rainbow", {"support": [1.0, 0.0]}, r"support=\[1.0, 0.0\].* increasing pair"),
        ("crossq", {"tau": 0.1}, "tau"),
        ("rainbow", {"epsilon_end": 0.1}, "epsilon_end=0.1: .* noisy=true explores with noisy"),
        ("rainbow", {"head": "quantile", "support": [0.0, 1.0]}, r"because head=quantile"),
        ("rainbow", {"head": "value", "support": [0.0, 1.0]}, r"because head=value does not use"),
        ("rainbow", {"head": "value", "atoms": 11}, r"atoms=11: .* because head=value"),
        (
            "rainbow",
            {"head": "value", "loss": "DQNLoss"},
            r"loss='DQNLoss': The loss disables weight noise.* Use loss=auto or noisy=false",
        ),
        (
            "rainbow",
            {"per_alpha": 0.0, "per_beta": 0.5},
            r"per_beta=0\.5: It has no effect because per_alpha=0",
        ),
        ("sac_discrete", {"target_entropy": 2.0}, "target_entropy=2.0: The value must be"),
    ],
)
def test_build_rejects_invalid_algorithm_settings(name, settings, message):
    with pytest.raises((SettingError, TypeError), match=message):
        built(name, **settings)


def test_dqn_pixels_learns_from_frames_stored_once():
    steps = OffPolicySteps(
        total_policy_steps=3_000, steps_per_env=2, learning_starts=200, replay_ratio="1/2",
        minibatch_size=32, evaluation_every=None,
    )  # fmt: skip
    trainer = built(
        "dqn_pixels", env=EnvConfig("kit.testing.envs:kit/Glimpse-v0", 1), steps=steps,
        preprocess="none", stacked_frames=2, convolutions=[[8, 3, 2]], hidden_sizes=[32],
        learning_rate=2e-3, target_update_every=50, exploration_share=0.3, buffer_size=2_000,
    )  # fmt: skip
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert trainer.update.plain_reason == ""
    assert trainer.buffer.buffer.storage.frames == 2
    assert trainer.journal.latest["evaluation/return"] > 7.0


def test_clip_reward_limits_sampled_rewards_to_sign():
    trainers = [
        built(
            "dqn_pixels", env=EnvConfig("kit.testing.envs:kit/Glimpse-v0", 1), preprocess="none",
            stacked_frames=1, convolutions=[[8, 3, 2]], clip_reward=clip,
        )
        for clip in (True, False)
    ]  # fmt: skip
    for trainer in trainers:
        trainer.buffer.extend(trainer.collector.collect())
        trainer.buffer.buffer.storage.get(slice(0, 1))["next", "reward"].fill_(7.0)
    seen = [t.stages.pipe("process_optim_batch", t.buffer._samples(64, 1)[0]) for t in trainers]
    assert [minibatch["next", "reward"].max().item() for minibatch in seen] == [1.0, 7.0]


@pytest.mark.parametrize("name", ["dqn", "rainbow"])
def test_build_rejects_exploration_share_of_constant_epsilon(name):
    how = {"noisy": False} if name == "rainbow" else {}
    with raises_setting("exploration_share"):
        built(name, epsilon_start=0.5, epsilon_end=0.5, exploration_share=0.5, **how)


def with_own_epsilon(**settings: Any) -> tuple[Trainer, EpsilonGreedy]:
    trainer = built("dqn", **settings)
    (noise,) = (m for m in trainer.collector.policy.modules() if isinstance(m, EpsilonGreedy))
    return trainer.add(Anneal(noise, "eps", Piecewise([60], [0.5, 0.25]))), noise


def test_custom_schedule_sets_only_constant_epsilon():
    trainer, noise = with_own_epsilon(epsilon_start=0.5, epsilon_end=0.5)
    trainer.run()
    assert float(noise.eps) == 0.25
    with raises_setting("hook"):
        with_own_epsilon()


class SharedEncoder:
    """SAC whose actor and critics read what one network writes."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __call__(self, cfg: Any) -> Trainer:
        """Build it."""
        experiment = Experiment(cfg, algorithm="shared")
        env = experiment.make_env()
        encoder = TensorDictModule(nn.Linear(3, 8), ["observation"], ["features"])
        encoder.out_features = 8
        actor = make_actor(env, body=encoder, continuous="tanh_normal", return_log_prob=False)
        value = ValueOperator(MLP(9, 1, num_cells=[8]), in_keys=["features", "action"])
        critic = TensorDictSequential(encoder, value)
        loss = experiment.make_loss(SACLoss, actor, critic, **self.settings)
        optimizer, targets = Adam(loss.parameters(), 0.01), SoftUpdate(loss, tau=0.1)
        update = Update(loss, optimizer, target_updater=targets, compile=cfg.compile)
        buffer = experiment.make_replay_buffer()
        return experiment.trainer(env, actor, buffer=buffer, update=update)


def test_build_rejects_loss_that_copies_shared_weights():
    with raises_setting("make_loss"):
        built("sac", make=SharedEncoder())


def test_shared_encoder_stays_shared_and_resumes_exactly(tmp_path):
    make = SharedEncoder(separate_losses=True)
    whole = built("sac", tmp_path, make=make)
    whole.run()
    loss = whole.loss_module
    encoder = loss.actor_network_params["module", "0", "module", "0", "module", "weight"]
    seen = loss.qvalue_network_params["module", "0", "module", "weight"]
    assert torch.equal(seen, encoder.expand(2, 8, 3))
    (folder,) = tmp_path.glob("*/*/*")
    before = min((folder / "checkpoints").iterdir())
    resumed = built("sac", make=make)
    resumed.load(before)
    assert resumed.policy_steps < 120
    resumed.run()
    for one, other in zip(resumed.loss_module.parameters(), loss.parameters()):
        assert torch.equal(one, other)


def test_build_rejects_clip_reward_with_n_step():
    with raises_setting("clip_reward"):
        built("dqn_pixels", env=EnvConfig("kit.testing.envs:kit/Glimpse-v0", 1),
              preprocess="none", stacked_frames=1, convolutions=[[8, 3, 2]], n_step=3)  # fmt: skip


def test_build_rejects_clip_reward_with_normalize_reward():
    env = EnvConfig("kit.testing.envs:kit/Glimpse-v0", 1, normalize_reward=True)
    with raises_setting("env.normalize_reward"):
        built("dqn_pixels", env=env, preprocess="none", stacked_frames=1, convolutions=[[8, 3, 2]])


# ---------------------------------------------------------------------- as they come
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "seed"), [("ddpg", 2), ("droq", 0)])
def test_recipe_solves_pendulum_with_defaults(name, seed):
    recipe = importlib.import_module(f"recipes.{name}")
    config = recipe.Config(log_dir=None, progress=False, seed=seed)
    config.steps.evaluation_every, config.steps.evaluation_episodes = None, 100
    trainer = recipe.build(config)
    trainer.run()
    assert trainer.ledger.compare(trainer.plan) == []
    assert trainer.journal.latest["evaluation/return"] >= -180.0


# ---------------------------------------------------------------------- what the buffer stores
STACK = {"wrappers": [functools.partial(FrameStackObservation, stack_size=4)]}
ONCE = {"replay_buffer_ignore_obs_next": True}
NEWEST = {**ONCE, "replay_buffer_save_only_last_obs": True, "replay_buffer_stack_num": 4}


STORED: list[dict[str, Any]] = [
    {"store_next_observation": False},
    {"stacked_frames": 4},
    {"buffer_folder": "."},
    {"buffer_folder": ".", "stacked_frames": 4},
]


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("name", "env"), [("dqn", "CartPole-v1"), ("td3", "Pendulum-v1")])
def test_observation_storage_leaves_training_unchanged(name, env, stored):
    how = {"env": EnvConfig(id=env, num_envs=2, kwargs=STACK), "n_step": 1}
    trainers = [built(name, **how, **more) for more in ({}, stored)]
    for trainer in trainers:
        trainer.run()
    once = isinstance(trainers[1].buffer.buffer.storage, ObservationStorage)
    assert once == (stored.keys() != {"buffer_folder"})
    assert_equal(*map(weights, trainers))


@pytest.mark.parametrize("words", [ONCE, NEWEST])
def test_tianshou_buffer_fields_configure_observation_storage(words):
    def trained(**words: Any) -> Trainer:
        steps = Tianshou(
            num_epochs=1, step_per_epoch=100, step_per_collect=2, num_train_envs=2,
            update_per_step=0.5, batch_size=8, start_timesteps=20, **words,
        )  # fmt: skip
        trainer = built("dqn", steps=steps, n_step=1, env=EnvConfig(num_envs=2, kwargs=STACK))
        ledger = trainer.run()
        assert ledger.compare(trainer.plan) == []
        return trainer

    with_words, without = trained(**words), trained()
    assert with_words.buffer.buffer.storage.frames == words.get("replay_buffer_stack_num", 1)
    assert_equal(weights(with_words), weights(without))


@pytest.mark.parametrize("stored", STORED[1:], ids=str)
def test_run_resumes_bitwise_with_every_observation_storage(stored, tmp_path):
    how: Any = {"env": EnvConfig(num_envs=2, kwargs=STACK), "n_step": 1, **stored}
    whole = built("dqn", **how)
    whole.run()
    broken = built("dqn", **how)
    broken.folder = tmp_path
    broken.register_op(
        "post_steps", lambda: broken.request_stop() if broken.policy_steps == 70 else None
    )
    broken.run()
    resumed = built("dqn", **how).load(broken.last_checkpoint)
    resumed.run()
    assert_equal(weights(whole), weights(resumed))
