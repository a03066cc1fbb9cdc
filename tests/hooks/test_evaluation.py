"""The evaluator: whole episodes, hidden state and random numbers of their own."""

from __future__ import annotations

import dataclasses
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import GRUModule

import recipes.ppo
from kit.envs import EnvError, make_env
from kit.experiment import EnvConfig, OnPolicySteps
from kit.hooks import Evaluator
from kit.modules import make_actor
from tests.errors import raises_setting
from tests.tiny import Scripted

pytestmark = pytest.mark.filterwarnings("ignore:the policy runs eagerly")


class Seen(nn.Module):
    """Notes what it is called with."""

    in_keys = ("observation", "is_init", "h")
    out_keys = ()

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, tensordict):
        found = {key: tensordict.get(key, None) for key in self.in_keys}
        self.calls.append({k: None if v is None else v.clone() for k, v in found.items()})
        return tensordict


def recurrent():
    """A GRU that falls over soon, and what notes its inputs."""
    torch.manual_seed(3)
    keys = {"in_keys": ["observation", "h"], "out_keys": ["features", ("next", "h")]}
    memory = GRUModule(input_size=4, hidden_size=4, **keys)
    logits = TensorDictModule(nn.Linear(4, 2), ["features"], ["logits"])
    choice = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    seen = Seen()
    return TensorDictSequential(memory, logits, choice), seen


def test_evaluator_rejects_invalid_seed():
    env = make_env("CartPole-v1")
    with raises_setting("seed"):
        Evaluator(env, make_actor(env), seed="1")


def test_hidden_state_resets_at_episode_start():
    policy, seen = recurrent()

    def noted(tensordict: TensorDict) -> TensorDict:
        return policy(seen(tensordict))

    evaluator = Evaluator(make_env("CartPole-v1", 1), noted, episodes=3)
    lengths = [episode.length for episode in evaluator.play()]
    starts = [0, lengths[0], lengths[0] + lengths[1]]
    # The call that could not be recorded was made again.
    pairs = zip(seen.calls, seen.calls[1:])
    again = [torch.equal(one["observation"], other["observation"]) for one, other in pairs]
    calls = [call for call, same in zip(seen.calls, [*again, False]) if not same]
    assert len(calls) == sum(lengths)
    for number, call in enumerate(calls):
        assert bool(call["is_init"].all()) == (number in starts)
        assert call["h"] is None or bool(call["h"].eq(0).all()) == (number in starts)


def test_recurrent_evaluations_are_reproducible():
    policy, _ = recurrent()
    evaluator = Evaluator(make_env("CartPole-v1", 2), policy, episodes=4)
    assert evaluator.play(1) == evaluator.play(1)


def test_evaluation_preserves_mode_of_each_module():
    env = make_env("CartPole-v1", 2)
    frozen = nn.BatchNorm1d(4).eval()
    normalize = TensorDictModule(frozen, in_keys=["observation"], out_keys=["observation"])
    policy = TensorDictSequential(normalize, make_actor(env))
    Evaluator(env, policy, episodes=2).play()
    assert policy.training
    assert not frozen.training


def test_evaluator_isolates_its_rng():
    env = make_env("CartPole-v1", 2)
    evaluator = Evaluator(env, make_actor(env), exploration_type=ExplorationType.RANDOM)
    before = torch.get_rng_state()
    first = evaluator.play()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    assert evaluator.play() == first


def test_evaluator_uses_device_of_policy_parameters():
    env = make_env("CartPole-v1", 2)
    assert Evaluator(env, make_actor(env).to("meta")).device == torch.device("meta")
    assert Evaluator(env, lambda tensordict: tensordict).device == torch.device("cpu")


def test_fast_policy_modes_give_equal_evaluations():
    env = make_env("CartPole-v1", 3)
    policy = make_actor(env)
    played = {
        fast: Evaluator(env, policy, episodes=4, seed=2, fast_policy=fast).play()
        for fast in ("auto", "exact", "module")
    }
    assert played["auto"] == played["exact"] == played["module"]
    with raises_setting("fast_policy"):
        Evaluator(env, policy, fast_policy="quick")


def test_evaluator_uses_numpy_for_small_networks():
    env = make_env("Pendulum-v1", 2)
    policy = make_actor(env)
    kinds = "auto", "exact"
    evaluators = [Evaluator(env, policy, episodes=2, fast_policy=kind) for kind in kinds]
    auto, exact = (evaluator()["evaluation/return"] for evaluator in evaluators)
    assert auto == pytest.approx(exact, rel=1e-5)
    assert [evaluator._actor.path.name for evaluator in evaluators] == ["numpy", "program"]


def test_evaluator_plays_same_episodes_for_any_chunk_size(monkeypatch):
    env = make_env("CartPole-v1", 3)
    evaluator = Evaluator(env, make_actor(env), episodes=10)
    played = evaluator.play()
    assert len(played) == 10
    assert [sum(one.env == env for one in played) for env in range(3)] == [4, 3, 3]
    for steps in (1, 7):
        monkeypatch.setattr("kit.hooks.evaluation.CHUNK", steps)
        assert evaluator.play() == played


@pytest.mark.parametrize("chunk", [3, 10, 64])
def test_evaluator_cuts_episodes_that_do_not_end(chunk, monkeypatch):
    monkeypatch.setattr("kit.hooks.evaluation.CHUNK", chunk)
    env = make_env(lambda: Scripted(length=10**9), 2)
    evaluator = Evaluator(env, make_actor(env), episodes=3, max_steps=20)
    with pytest.warns(
        UserWarning, match=r"truncated 3 episodes of .* after 20 policy steps. Set env"
    ):
        columns = evaluator()
    assert columns["evaluation/truncated_episodes"] == 3
    assert columns["evaluation/return"] == columns["evaluation/length"] == 20
    assert [(one.env, one.length) for one in evaluator.play()] == [(0, 20), (1, 20), (0, 20)]


def test_evaluator_counts_cut_episodes_among_complete_ones():
    def make() -> Scripted:
        made.append(Scripted(length=(5, 30)[len(made) % 2]))
        return made[-1]

    made: list[Scripted] = []
    env = make_env(make, 2)
    evaluator = Evaluator(env, make_actor(env), episodes=4, max_steps=20)
    with pytest.warns(UserWarning, match="truncated 2 episodes"):
        columns = evaluator()
    assert sorted(one.length for one in evaluator.play()) == [5, 5, 20, 20]
    assert columns["evaluation/truncated_episodes"] == 2


def test_evaluator_omits_truncation_column_without_cut_episodes():
    env = make_env(lambda: Scripted(length=20), 2)
    columns = Evaluator(env, make_actor(env), episodes=3, max_steps=20)()
    assert "evaluation/truncated_episodes" not in columns
    assert columns["evaluation/length"] == 20


class NotANumber(Scripted):
    """Observes NaN, or earns it, in the second step of its episode."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.made = what, 0

    def reset(self, **given):
        self.made = 0
        return super().reset(**given)

    def step(self, action):
        seen, reward, *rest = super().step(action)
        self.made += 1
        if self.made == 2:
            seen, reward = (seen * np.nan, reward) if self.what == "observation" else (seen, np.nan)
        return seen, reward, *rest


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_evaluation_names_env_that_returns_nan(what):
    env = make_env(lambda: NotANumber(what), 2)
    with pytest.raises(EnvError, match=f"env 0, .*: returned NaN as {what}"):
        Evaluator(env, make_actor(env, (4,)), episodes=2)(1)


def test_evaluator_rejects_env_that_cannot_be_recreated():
    env = make_env(GymEnv("CartPole-v1", categorical_action_encoding=True))
    evaluator = Evaluator(env, make_actor(env, (4,)), episodes=2)
    with raises_setting("env"):
        evaluator.again(episodes=1, seed=0)


class Fading(gym.Env):
    """Pays less in every episode; ``state``: whether its state can be captured."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, state=True):
        self.episodes, self.lock = 0, None if state else threading.Lock()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1 / self.episodes, True, False, {}


gym.register("kit/Fading-v0", Fading)


def faded(folder, *, stops=False, **kwargs):
    """The evaluations of a run, which may be stopped in the middle and resumed."""
    steps = OnPolicySteps(
        total_policy_steps=32, steps_per_env=8, minibatch_size=8, evaluation_every=8,
        evaluation_episodes=2,
    )  # fmt: skip
    config = recipes.ppo.Config(
        env=EnvConfig(id="kit/Fading-v0", num_envs=1, kwargs=kwargs), steps=steps,
        hidden_sizes=[4], log_dir=str(folder), log_every=8, progress=False, logger="none",
    )  # fmt: skip
    trainer = recipes.ppo.build(config)
    returns = []
    if stops:
        trainer.register_op(
            "post_steps", lambda: trainer.request_stop() if trainer.policy_steps == 16 else None
        )
        trainer.run()
        trainer = recipes.ppo.build(dataclasses.replace(config, resume=str(trainer.folder)))
    trainer.register_op("log_row", lambda row: returns.append(row["evaluation/return"]))
    trainer.run()
    return returns


def test_resumed_evaluation_keeps_env_state_across_episodes(tmp_path):
    whole, rest = faded(tmp_path), faded(tmp_path, stops=True)
    assert whole == sorted(whole, reverse=True)
    assert len(set(whole)) == 4
    assert rest == whole[-len(rest) :]


def test_evaluation_warns_when_its_state_cannot_be_captured(tmp_path):
    with pytest.warns(UserWarning, match="do not contain the state of the evaluation env"):
        faded(tmp_path, state=False)
