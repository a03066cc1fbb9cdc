"""Small environments whose best policy is known, and trainers that run in a blink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate

from kit.advantages import GAE
from kit.buffers import make_replay_buffer
from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.hooks import Evaluator
from kit.modules import make_action_value, make_actor, make_value
from kit.steps import StepPlan
from kit.trainer import Trainer
from kit.update import Update


class Guess(gym.Env):
    """Shows a number in every step; the action that answers it earns 1, an episode is 8 steps long.

    Args:
        action_space: what answers look like; entries of a ``Dict`` are all asked at once.
        dict_observation: whether the number is shown in a ``Dict`` space, split in two.
    """

    CHOICES = 3
    STEPS = 8

    def __init__(self, action_space: spaces.Space, dict_observation: bool = False) -> None:
        self.action_space = action_space
        box = spaces.Box(0.0, 1.0, (self.CHOICES,), np.float32)
        self.split = dict_observation
        split = spaces.Dict({"ones": box, "choice": spaces.Discrete(self.CHOICES)})
        self.observation_space = split if dict_observation else box

    def _ask(self) -> Any:
        self.asked = int(self.np_random.integers(self.CHOICES))
        shown = np.zeros(self.CHOICES, np.float32)
        if self.split:
            return {"ones": shown + 1, "choice": self.asked}
        shown[self.asked] = 1.0
        return shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.count = 0
        return self._ask(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        reward = self._reward(self.action_space, action)
        self.count += 1
        return self._ask(), reward, self.count == self.STEPS, False, {}

    def _reward(self, space: spaces.Space, action: Any) -> float:
        if isinstance(space, spaces.Dict):
            return float(np.mean([self._reward(s, action[name]) for name, s in space.items()]))
        if isinstance(space, spaces.Box):
            wanted = self.asked / (self.CHOICES - 1) - 0.5
            return float(1.0 - np.abs(np.asarray(action) - wanted).mean())
        return float(np.mean(np.asarray(action) == self.asked))


class Uneven(Guess):
    """Answers are two numbers, each with bounds of its own, of half ranges 2 and 1/4."""

    HALF_RANGES = (2.0, 0.25)

    def __init__(self) -> None:
        low, high = np.array([-1, 0], np.float32), np.array([3, 0.5], np.float32)
        super().__init__(spaces.Box(low, high))


class Scripted(gym.Env):
    """Counts its steps; truncated after ``length``; ``fault`` is called with the step number."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self, length: int = 5, fault: Callable[[int], Any] | None = None, **spaces: Any
    ) -> None:
        self.length, self.fault, self.total = length, fault, 0
        for name, space in spaces.items():
            setattr(self, name, space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        self.total += 1
        observation: Any = np.full(2, self.count, np.float32)
        if self.fault is not None:
            changed = self.fault(self.total)
            observation = observation if changed is None else changed
        return observation, 1.0, False, self.count >= self.length, {}


# ---------------------------------------------------------------------- trainers
def on_policy_plan(**changes: Any) -> StepPlan:
    """Four iterations of 2 x 8 policy steps, each two passes in minibatches of 8."""
    settings = {
        "total_policy_steps": 64, "num_envs": 2, "steps_per_env": 8, "update_epochs": 2,
        "minibatch_size": 8, "final_evaluation": False,
    }  # fmt: skip
    return StepPlan(**{**settings, **changes})


def off_policy_plan(**changes: Any) -> StepPlan:
    """Forty iterations of one policy step, learning from the tenth on, one gradient step each."""
    settings = {
        "total_policy_steps": 40, "num_envs": 1, "steps_per_env": 1, "learning_starts": 10,
        "replay_ratio": 1, "minibatch_size": 4, "final_evaluation": False,
    }  # fmt: skip
    return StepPlan(**{**settings, **changes})


def collector_of(plan: StepPlan, env: Any, actor: Any, **changes: Any) -> VectorCollector:
    settings = {
        "frames_per_batch": plan.frames_per_batch, "total_frames": plan.total_policy_steps,
        "init_random_frames": plan.random_steps_until(plan.total_policy_steps),
        "prefill_frames": plan.local_prefill_steps,
    }  # fmt: skip
    return VectorCollector(env, actor, **{**settings, **changes})


def ppo_parts(
    plan: StepPlan,
    env: Any = "CartPole-v1",
    seed: int = 0,
    sizes: tuple[int, ...] = (8,),
    **collector: Any,
) -> dict[str, Any]:
    """The parts of a small PPO, by the name of the trainer's argument; it shows nothing."""
    torch.manual_seed(seed)
    env = make_env(env, plan.num_envs, seed=seed, action_repeat=plan.action_repeat)
    actor, critic = make_actor(env, sizes), make_value(env, sizes)
    loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
    return {
        "collector": collector_of(plan, env, actor, seed=seed, **collector),
        "advantage": GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        "update": Update(loss, torch.optim.Adam(loss.parameters(), lr=1e-3), max_grad_norm=0.5),
        "progress": False,
    }


def sac_parts(
    plan: StepPlan, env: Any = "Pendulum-v1", seed: int = 0, sizes: tuple[int, ...] = (8,)
) -> dict[str, Any]:
    """The parts of a small SAC, by the name of the trainer's argument; it shows nothing."""
    torch.manual_seed(seed)
    env = make_env(env, plan.num_envs, seed=seed, action_repeat=plan.action_repeat)
    actor = make_actor(env, sizes, continuous="tanh_normal", orthogonal=False)
    loss = SACLoss(actor, make_action_value(env, sizes), num_qvalue_nets=2, loss_function="l2")
    loss.make_value_estimator(gamma=0.99)
    return {
        "collector": collector_of(plan, env, actor.select_out_keys("action"), seed=seed),
        "buffer": make_replay_buffer(1_000, plan.minibatch_size),
        "update": Update(
            loss,
            torch.optim.Adam(loss.parameters(), lr=1e-3),
            target_updater=SoftUpdate(loss, tau=0.01),
        ),
        "progress": False,
    }


def ppo_trainer(plan: StepPlan | None = None, env: Any = "CartPole-v1", **parts: Any) -> Trainer:
    plan = plan or on_policy_plan()
    return Trainer(plan, **{**ppo_parts(plan, env), **parts})


def sac_trainer(plan: StepPlan | None = None, env: Any = "Pendulum-v1", **parts: Any) -> Trainer:
    plan = plan or off_policy_plan()
    return Trainer(plan, **{**sac_parts(plan, env), **parts})


def evaluator_for(trainer_parts: dict[str, Any], plan: StepPlan, env: Any) -> Evaluator:
    """An evaluator of the collector's policy, in environments of its own."""
    own = make_env(env, plan.evaluation_episodes)
    policy = trainer_parts["collector"].policy
    return Evaluator(own, policy, episodes=plan.evaluation_episodes)


def transitions_buffer(size: int = 1_000, batch_size: int = 8) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=batch_size)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that is learnt, target networks included."""
    return {name: value.clone() for name, value in trainer.loss_module.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Both are bitwise the same."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Both states hold the same values, bitwise."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), where
    elif isinstance(one, (Mapping, TensorDictBase)):
        assert set(one.keys()) == set(other.keys()), where
        for key in one.keys():  # a TensorDict iterates over its rows
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other)):
            assert_same(*pair, f"{where}/{number}")
    else:
        assert one == other, where


class Rows:
    """A logger that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.texts: dict[str, str] = {}
        self.config: dict[str, Any] = {}
        self.closed = 0

    def start(self) -> None:
        pass

    def log_row(self, row: Any) -> None:
        self.rows.append(dict(row))

    def log_text(self, name: str, text: str) -> None:
        self.texts[name] = text

    def log_config(self, config: Any) -> None:
        self.config = dict(config)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self.closed += 1
