"""Others that collect: loops by hand, TorchRL, Stable-Baselines3, tianshou, nobody.

Each function returns a :class:`Case`. All sample from a policy with two hidden layers of 64 units
and tanh, new and untrained, in the same environment.
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

SECONDS = 0.25
"""how long a case collects in each round, at least."""
STEPS = 128
"""policy steps of each env in a batch."""


class Case:
    """Collects for a while and returns policy steps per second.

    Args:
        collect: collects once and returns how many policy steps.
        close: ends it.
    """

    def __init__(self, collect: Callable[[], int], close: Callable[[], Any] = lambda: None) -> None:
        self.collect, self.close = collect, close
        collect()

    def __call__(self) -> float:
        """Return policy steps per second."""
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            steps += self.collect()
        return steps / (time.perf_counter() - began)


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return the policy's network."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def random_actions(space: gym.Space[Any], count: int) -> list[Any]:
    """Return actions like those of a policy that has not learnt: uniform, or clipped normal."""
    rng = np.random.default_rng(0)
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(space.n, size=count).tolist()
    noise = rng.standard_normal((count, *space.shape), dtype=np.float32)
    return list(np.clip(noise, space.low, space.high))


def environment_alone(id: str, num_envs: int) -> Case:
    """Copies stepped one after the other, with actions drawn before; nothing is kept."""
    envs = [gym.make(id, disable_env_checker=True) for _ in range(num_envs)]
    for number, env in enumerate(envs):
        env.reset(seed=number)
    drawn = random_actions(envs[0].action_space, STEPS * num_envs)

    def collect() -> int:
        actions = iter(drawn)
        for _ in range(STEPS):
            for env in envs:
                _, _, terminated, truncated, _ = env.step(next(actions))
                if terminated or truncated:
                    env.reset()
        return STEPS * num_envs

    return Case(collect)


def environment_and_network(id: str, num_envs: int) -> Case:
    """As above, but every step also calls the bare network: three ``addmm``, two ``tanh``.

    Nothing is sampled, clipped or kept: what no loop with a network of PyTorch can be faster than.
    """
    envs = [gym.make(id, disable_env_checker=True) for _ in range(num_envs)]
    seen = np.stack([env.reset(seed=n)[0] for n, env in enumerate(envs)]).astype(np.float32)
    drawn = random_actions(envs[0].action_space, STEPS * num_envs)
    outputs = np.asarray(drawn[0]).size if envs[0].action_space.shape else 2
    layers = [value.detach() for value in network(seen.shape[1], outputs).parameters()]
    (w1, b1), (w2, b2), (w3, b3) = ((layers[n].t(), layers[n + 1]) for n in (0, 2, 4))

    @torch.inference_mode()
    def collect() -> int:
        actions = iter(drawn)
        for _ in range(STEPS):
            hidden = torch.addmm(b1, torch.from_numpy(seen), w1).tanh()
            torch.addmm(b3, torch.addmm(b2, hidden, w2).tanh(), w3)
            for number, env in enumerate(envs):
                now, _, terminated, truncated, _ = env.step(next(actions))
                if terminated or truncated:
                    now, _ = env.reset()
                seen[number] = now
        return STEPS * num_envs

    return Case(collect)


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


class _Batch:
    """What a loop by hand keeps of a batch: what every collector of the kit keeps, as arrays."""

    def __init__(self, num_envs: int, env: gym.Env[Any, Any]) -> None:
        size, space = (STEPS, num_envs), env.action_space
        kind = np.int64 if isinstance(space, gym.spaces.Discrete) else np.float32
        self.observation = np.empty((*size, *env.observation_space.shape), np.float32)
        self.next_observation = np.empty_like(self.observation)
        self.action = np.empty((*size, *space.shape), kind)
        self.log_prob, self.reward = np.empty((2, *size), np.float32)
        self.terminated, self.truncated = np.empty((2, *size), np.bool_)


def loop_of_envs(id: str, num_envs: int) -> Case:
    """A loop by hand over a list of envs."""
    envs = [gym.make(id, disable_env_checker=True) for _ in range(num_envs)]
    head, bounds = _Head(envs[0]), envs[0].action_space
    seen = np.stack([env.reset(seed=0)[0] for env in envs]).astype(np.float32)

    @torch.inference_mode()
    def collect() -> int:
        batch = _Batch(num_envs, envs[0])
        for step in range(STEPS):
            batch.observation[step] = seen
            action, log_prob = head(torch.from_numpy(seen))
            batch.action[step], batch.log_prob[step] = action.numpy(), log_prob.numpy()
            if head.discrete:
                chosen = action.tolist()
            else:
                chosen = list(np.clip(action.numpy(), bounds.low, bounds.high))
            for number, env in enumerate(envs):
                now, reward, terminated, truncated, _ = env.step(chosen[number])
                batch.next_observation[step, number] = now
                batch.reward[step, number] = reward
                batch.terminated[step, number] = terminated
                batch.truncated[step, number] = truncated
                if terminated or truncated:
                    now, _ = env.reset()
                seen[number] = now
        return STEPS * num_envs

    return Case(collect)


def loop_of_vector(id: str, num_envs: int, mode: str = "sync") -> Case:
    """A loop by hand over one of Gymnasium's vector environments.

    Those of ``mode="vector_entry_point"`` spend a step on each reset: it is kept, but not counted,
    as no action is taken in it.
    """
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    vector = gym.make_vec(
        id, num_envs, mode, vector_kwargs=same_step if mode != "vector_entry_point" else None
    )
    one = gym.make(id)
    head, bounds = _Head(one), one.action_space
    now = vector.reset(seed=0)[0].astype(np.float32)
    ended = np.zeros(num_envs, np.bool_)

    @torch.inference_mode()
    def collect() -> int:
        nonlocal now, ended
        batch, resets = _Batch(num_envs, one), 0
        for step in range(STEPS):
            batch.observation[step] = now
            action, log_prob = head(torch.from_numpy(now))
            batch.action[step], batch.log_prob[step] = action.numpy(), log_prob.numpy()
            chosen = action.numpy()
            if not head.discrete:
                chosen = np.clip(chosen, bounds.low, bounds.high)
            now, batch.reward[step], terminated, truncated, info = vector.step(chosen)
            now = now if now.dtype == np.float32 else now.astype(np.float32)
            batch.next_observation[step] = now
            batch.terminated[step], batch.truncated[step] = terminated, truncated
            if "final_obs" in info:
                for number in np.flatnonzero(info["_final_obs"]):
                    batch.next_observation[step, number] = info["final_obs"][number]
            if mode == "vector_entry_point":
                resets += int(ended.sum())
                ended = terminated | truncated
        return STEPS * num_envs - resets

    return Case(collect, vector.close)


def torchrl(id: str, num_envs: int, processes: int | None = None) -> Case:
    """TorchRL's ``Collector``.

    Observations of 64 bits stay so, and the policy is of 64 bits then: a transform costs more.

    Args:
        id: of the environment.
        num_envs: number of envs.
        processes: of ``ParallelEnv``, each with an equal share of the envs in a ``SerialEnv``;
            ``None``: one ``SerialEnv`` here, or the environment itself where there is one.
    """
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, ParallelEnv, SerialEnv

    discrete = isinstance(gym.spec(id).make().action_space, gym.spaces.Discrete)
    keywords = {"categorical_action_encoding": True} if discrete else {}

    def make() -> Any:
        return GymEnv(id, **keywords)

    def make_share() -> Any:
        share = num_envs // (processes or 1)
        return make() if share == 1 else SerialEnv(share, make)

    policy = torchrl_policy(make())
    env = make_share() if processes is None else ParallelEnv(processes, make_share)
    collector = Collector(
        env,
        policy,
        frames_per_batch=STEPS * num_envs,
        total_frames=-1,
        trust_policy=True,
        auto_register_policy_transforms=False,
    )
    iterator = iter(collector)
    return Case(lambda: next(iterator).numel(), collector.shutdown)


def torchrl_policy(env: Any) -> Any:
    """Return a policy of TorchRL's and PyTorch's parts, for one environment."""
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.modules import IndependentNormal, ProbabilisticActor

    inputs, spec = env.observation_spec["observation"], env.action_spec
    if spec.dtype == torch.int64:
        net: nn.Module = network(inputs.shape[-1], int(spec.n))
        keys, distribution = ["logits"], torch.distributions.Categorical
    else:
        net = nn.Sequential(network(inputs.shape[-1], 2 * spec.shape[-1]), NormalParamExtractor())
        keys, distribution = ["loc", "scale"], IndependentNormal
    return ProbabilisticActor(
        TensorDictModule(net.to(inputs.dtype), in_keys=["observation"], out_keys=keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )


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

    return Case(collect)


def tianshou(id: str, num_envs: int) -> Case:
    """Collector of tianshou 2, over envs in this process, with a buffer of one batch."""
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic
    from tianshou.utils.net.discrete import DiscreteActor

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

    return Case(collect)
