"""Others that collect: loops by hand, TorchRL, Stable-Baselines3, tianshou, nobody.

Each function returns a case: a function that collects for a while and returns policy steps per
second. All use a policy of two hidden layers of 64 units with tanh, sampled, on one environment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

SECONDS = 0.5
"""how long a case collects, at least."""
STEPS = 128
"""policy steps of each copy in a batch."""

Case = Callable[[], float]


def case_of(collect: Callable[[], int]) -> Case:
    """Return a case from a function that collects once and returns how many policy steps."""

    def run() -> float:
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            steps += collect()
        return steps / (time.perf_counter() - began)

    collect()
    return run


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return the policy's network."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def environment_alone(id: str, num_envs: int) -> Case:
    """Copies stepped one after the other, always with the same actions; finished ones reset."""
    copies = [gym.make(id, disable_env_checker=True) for _ in range(num_envs)]
    for copy in copies:
        copy.reset(seed=0)
    actions = [copy.action_space.sample() for copy in copies]

    def collect() -> int:
        for _ in range(STEPS):
            for copy, action in zip(copies, actions):
                _, _, terminated, truncated, _ = copy.step(action)
                if terminated or truncated:
                    copy.reset()
        return STEPS * num_envs

    return case_of(collect)


class _Head:
    """The policy of a loop by hand: samples actions and returns their log-probabilities."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        inputs = env.observation_space.shape[0]
        self.discrete = isinstance(env.action_space, gym.spaces.Discrete)
        outputs = int(env.action_space.n) if self.discrete else env.action_space.shape[0]
        self.net = network(inputs, outputs)
        self.log_scale = torch.zeros(outputs)

    def __call__(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.net(observation)
        if self.discrete:
            logits = columns.log_softmax(-1)
            action = torch.multinomial(logits.exp(), 1)
            return action.squeeze(-1), logits.gather(-1, action).squeeze(-1)
        noise = torch.randn_like(columns)
        action = columns + noise * self.log_scale.exp()
        log_prob = (-0.5 * (noise * noise + np.log(2 * np.pi)) - self.log_scale).sum(-1)
        return action, log_prob


class _Buffers:
    """What a loop by hand keeps of a batch, for PPO."""

    def __init__(self, num_envs: int, env: gym.Env[Any, Any]) -> None:
        size = (STEPS, num_envs)
        self.observation = torch.empty(*size, *env.observation_space.shape)
        kind = torch.int64 if isinstance(env.action_space, gym.spaces.Discrete) else torch.float32
        self.action = torch.empty(*size, *env.action_space.shape, dtype=kind)
        self.log_prob, self.reward = torch.empty(size), torch.empty(size)
        self.done = torch.empty(size, dtype=torch.bool)


def loop_of_copies(id: str, num_envs: int) -> Case:
    """A loop by hand over a list of copies."""
    copies = [gym.make(id, disable_env_checker=True) for _ in range(num_envs)]
    head, bounds = _Head(copies[0]), copies[0].action_space
    seen = np.stack([copy.reset(seed=0)[0] for copy in copies]).astype(np.float32)

    @torch.inference_mode()
    def collect() -> int:
        batch = _Buffers(num_envs, copies[0])
        rewards, done = batch.reward.numpy(), batch.done.numpy()
        for step in range(STEPS):
            observation = torch.from_numpy(seen)
            action, log_prob = head(observation)
            batch.observation[step], batch.action[step] = observation, action
            batch.log_prob[step] = log_prob
            if head.discrete:
                chosen = action.tolist()
            else:
                chosen = list(np.clip(action.numpy(), bounds.low, bounds.high))
            for number, copy in enumerate(copies):
                now, reward, terminated, truncated, _ = copy.step(chosen[number])
                ended = terminated or truncated
                if ended:
                    now, _ = copy.reset()
                seen[number] = now
                rewards[step, number], done[step, number] = reward, ended
        return STEPS * num_envs

    return case_of(collect)


def loop_of_vector(id: str, num_envs: int, mode: str = "sync") -> Case:
    """A loop by hand over one of Gymnasium's vector environments."""
    kwargs = {}
    if mode == "sync":
        kwargs["vector_kwargs"] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    vector = gym.make_vec(id, num_envs=num_envs, vectorization_mode=mode, **kwargs)
    one = gym.make(id)
    head, bounds = _Head(one), one.action_space
    seen = [vector.reset(seed=0)[0].astype(np.float32)]

    @torch.inference_mode()
    def collect() -> int:
        batch = _Buffers(num_envs, one)
        now = seen[0]
        for step in range(STEPS):
            observation = torch.from_numpy(now)
            action, log_prob = head(observation)
            batch.observation[step], batch.action[step] = observation, action
            batch.log_prob[step] = log_prob
            chosen = action.numpy()
            if not head.discrete:
                chosen = np.clip(chosen, bounds.low, bounds.high)
            now, reward, terminated, truncated, _ = vector.step(chosen)
            now = now if now.dtype == np.float32 else now.astype(np.float32)
            batch.reward[step] = torch.from_numpy(reward)
            batch.done[step] = torch.from_numpy(terminated | truncated)
        seen[0] = now
        return STEPS * num_envs

    return case_of(collect)


def torchrl(id: str, num_envs: int, batched: str) -> tuple[Case, Callable[[], None]]:
    """TorchRL's ``Collector`` over ``SerialEnv`` or ``ParallelEnv``, and how to shut it down."""
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, ParallelEnv, SerialEnv
    from torchrl.modules import IndependentNormal, ProbabilisticActor

    def make() -> Any:
        discrete = isinstance(gym.spec(id).make().action_space, gym.spaces.Discrete)
        return GymEnv(id, categorical_action_encoding=True) if discrete else GymEnv(id)

    one = make()
    discrete = not one.action_spec.is_discrete if False else one.action_spec.dtype == torch.int64
    inputs = one.observation_spec["observation"].shape[-1]
    if discrete:
        net: nn.Module = network(inputs, int(one.action_spec.n))
        keys, distribution = ["logits"], torch.distributions.Categorical
    else:
        net = nn.Sequential(network(inputs, 2 * one.action_spec.shape[-1]), NormalParamExtractor())
        keys, distribution = ["loc", "scale"], IndependentNormal
    policy = ProbabilisticActor(
        TensorDictModule(net.float(), in_keys=["observation"], out_keys=keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )
    if one.observation_spec["observation"].dtype == torch.float64:
        policy = policy.double()
    env = one
    if num_envs > 1:
        env = {"serial": SerialEnv, "parallel": ParallelEnv}[batched](num_envs, make)
    elif batched == "parallel":
        env = ParallelEnv(1, make)
    collector = Collector(
        env,
        policy,
        frames_per_batch=STEPS * num_envs,
        total_frames=-1,
        trust_policy=True,
        auto_register_policy_transforms=False,
    )
    iterator = iter(collector)
    return case_of(lambda: next(iterator).numel()), collector.shutdown


def stable_baselines3(id: str, num_envs: int) -> Case:
    """Stable-Baselines3's PPO collecting, with its value network as always."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CallbackList
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO(
        "MlpPolicy", make_vec_env(id, n_envs=num_envs), n_steps=STEPS, device="cpu",
        batch_size=STEPS * num_envs,
    )  # fmt: skip
    _, callback = model._setup_learn(10**9, CallbackList([]))

    def collect() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=STEPS)
        return STEPS * num_envs

    return case_of(collect)


def tianshou(id: str, num_envs: int) -> Case | None:
    """Collector of tianshou 2; ``None`` where it is not installed."""
    try:
        from tianshou.algorithm.modelfree.reinforce import (
            DiscreteActorPolicy,
            ProbabilisticActorPolicy,
        )
        from tianshou.data import Collector, VectorReplayBuffer
        from tianshou.env import DummyVectorEnv
        from tianshou.utils.net.common import Net
        from tianshou.utils.net.continuous import ContinuousActorProbabilistic
        from tianshou.utils.net.discrete import DiscreteActor
    except ImportError:
        return None
    env = gym.make(id)
    inputs, space = env.observation_space.shape, env.action_space
    body = Net(state_shape=inputs, hidden_sizes=(64, 64), activation=nn.Tanh)
    if isinstance(space, gym.spaces.Discrete):
        actor = DiscreteActor(preprocess_net=body, action_shape=space.n, softmax_output=False)
        policy = DiscreteActorPolicy(actor=actor, action_space=space)
    else:
        actor = ContinuousActorProbabilistic(
            preprocess_net=body, action_shape=space.shape, unbounded=True
        )
        policy = ProbabilisticActorPolicy(
            actor=actor,
            dist_fn=lambda pair: torch.distributions.Independent(
                torch.distributions.Normal(*pair), 1
            ),
            action_space=space,
        )
    vector = DummyVectorEnv([lambda: gym.make(id) for _ in range(num_envs)])
    collector = Collector(policy, vector, VectorReplayBuffer(STEPS * num_envs, num_envs))
    with contextlib.suppress(AttributeError):
        policy.eval()
    collector.reset()

    def collect() -> int:
        with torch.no_grad():
            collector.collect(n_step=STEPS * num_envs)
        return STEPS * num_envs

    return case_of(collect)
