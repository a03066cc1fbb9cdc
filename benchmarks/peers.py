"""Runs of other libraries with the settings of :mod:`benchmarks.end_to_end`, one a process.

    python -m benchmarks.peers stable_baselines3 "PPO, CartPole"

Each prints the steps that its first optimiser made. Stable-Baselines3 logs to CSV and evaluates 10
episodes at the end, as the kit does; tianshou logs to its default place and tests 10 episodes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

NETWORK = {"net_arch": [64, 64]}


# ---------------------------------------------------------------------- Stable-Baselines3
def _learned(model: Any, steps: int) -> None:
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.logger import configure

    with tempfile.TemporaryDirectory() as folder:
        model.set_logger(configure(folder, ["csv"]))
        model.learn(steps)
        evaluate_policy(model, model.get_env(), n_eval_episodes=10)


def _vector(id: str, number: int) -> Any:
    from stable_baselines3.common.env_util import make_vec_env

    return make_vec_env(id, number)


def sb3_ppo(id: str, total: int, num_envs: int, steps: int, size: int, epochs: int) -> None:
    """Clipped loss, defaults where nothing is said."""
    from stable_baselines3 import PPO

    model = PPO(
        "MlpPolicy", _vector(id, num_envs), n_steps=steps, batch_size=size, n_epochs=epochs,
        ent_coef=0.0, learning_rate=3e-4, seed=0, device="cpu",
    )  # fmt: skip
    _learned(model, total)


def sb3_a2c_cartpole() -> None:
    """One environment, batches of 5."""
    from stable_baselines3 import A2C

    model = A2C("MlpPolicy", "CartPole-v1", n_steps=5, seed=0, device="cpu", policy_kwargs=NETWORK)
    _learned(model, 65_536)


def sb3_recurrent() -> None:
    """Eight environments, batches of 1,024, an LSTM of 64 in front of actor and critic each."""
    from sb3_contrib import RecurrentPPO

    model = RecurrentPPO(
        "MlpLstmPolicy", _vector("CartPole-v1", 8), n_steps=128, batch_size=256, n_epochs=4,
        ent_coef=0.0, learning_rate=3e-4, seed=0, device="cpu",
        policy_kwargs={**NETWORK, "lstm_hidden_size": 64},
    )  # fmt: skip
    _learned(model, 65_536)


def sb3_dqn_cartpole() -> None:
    """One environment, a gradient step every 4 policy steps."""
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy", "CartPole-v1", learning_starts=1_000, train_freq=4, gradient_steps=1,
        batch_size=64, buffer_size=50_000, target_update_interval=500, seed=0, device="cpu",
        policy_kwargs=NETWORK,
    )  # fmt: skip
    _learned(model, 50_000)


def sb3_sac_lander() -> None:
    """Four environments, a gradient step every 4 policy steps."""
    from stable_baselines3 import SAC

    model = SAC(
        "MlpPolicy", _vector("LunarLanderContinuous-v3", 4), learning_starts=1_000, train_freq=1,
        gradient_steps=1, batch_size=256, buffer_size=65_536, seed=0, device="cpu",
        policy_kwargs={"net_arch": [256, 256]},
    )  # fmt: skip
    _learned(model, 24_000)


def sb3_td3_halfcheetah() -> None:
    """One environment, a gradient step each policy step."""
    from stable_baselines3 import TD3

    model = TD3(
        "MlpPolicy", "HalfCheetah-v5", learning_starts=1_000, train_freq=1, gradient_steps=1,
        batch_size=256, buffer_size=65_536, seed=0, device="cpu",
        policy_kwargs={"net_arch": [256, 256]},
    )  # fmt: skip
    _learned(model, 6_000)


def _eight_pongs() -> Any:
    """Environments with the wrappers of :mod:`kit.envs.pixels`, images last in their shape."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    def with_channel(env: Any) -> Any:
        grey = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
        return gym.wrappers.ReshapeObservation(grey, (84, 84, 1))

    gym.register_envs(ale_py)
    short = {"max_num_frames_per_episode": 4_000}
    id = "PongNoFrameskip-v4"
    envs = make_vec_env(id, 8, wrapper_class=with_channel, env_kwargs=short)
    return VecFrameStack(envs, 4)


def sb3_ppo_pong() -> None:
    """Eight environments, the settings of Schulman et al. (2017) for Atari."""
    from stable_baselines3 import PPO

    model = PPO(
        "CnnPolicy", _eight_pongs(), n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4,
        clip_range=0.1, ent_coef=0.01, seed=0, device="cpu",
    )  # fmt: skip
    _learned(model, 8_192)


# ---------------------------------------------------------------------- tianshou
def _tianshou(
    kind: str,
    id: str,
    params: Any,
    hidden_sizes: tuple[int, ...],
    critics: str | None,
    **config: Any,
) -> None:
    from tianshou.highlevel import experiment as highlevel
    from tianshou.highlevel.config import OffPolicyTrainingConfig, OnPolicyTrainingConfig
    from tianshou.highlevel.env import EnvFactoryRegistered, VectorEnvType
    from tianshou.highlevel.experiment import ExperimentConfig

    on_policy = kind in ("PPO", "A2C")
    training = (OnPolicyTrainingConfig if on_policy else OffPolicyTrainingConfig)(
        max_epochs=1, num_test_envs=1, test_step_num_episodes=10, **config
    )
    quiet = ExperimentConfig(persistence_enabled=False, log_file_enabled=False, watch=False)
    envs = EnvFactoryRegistered(task=id, venv_type=VectorEnvType.DUMMY)
    builder = getattr(highlevel, f"{kind}ExperimentBuilder")(envs, quiet, training)
    getattr(builder, f"with_{kind.lower()}_params")(params)
    if kind == "DQN":
        builder.with_model_factory_default(hidden_sizes)
    else:
        builder.with_actor_factory_default(hidden_sizes)
        getattr(builder, f"with_{critics}_factory_default")(hidden_sizes)
    builder.build().run()


def tianshou_ppo(id: str, steps: int, num_envs: int, batch: int, size: int, epochs: int) -> None:
    """Clipped loss, as Stable-Baselines3's defaults have it."""
    from tianshou.highlevel.params.algorithm_params import PPOParams

    params = PPOParams(lr=3e-4, ent_coef=0.0, max_grad_norm=0.5)
    _tianshou(
        "PPO", id, params, (64, 64), "critic", epoch_num_steps=steps, num_training_envs=num_envs,
        collection_step_num_env_steps=batch, batch_size=size, update_step_num_repetitions=epochs,
        buffer_size=batch,
    )  # fmt: skip


def tianshou_a2c() -> None:
    """One environment, batches of 5."""
    from tianshou.highlevel.params.algorithm_params import A2CParams

    params = A2CParams(lr=7e-4, ent_coef=0.0, max_grad_norm=0.5)
    _tianshou(
        "A2C", "CartPole-v1", params, (64, 64), "critic", epoch_num_steps=65_536,
        num_training_envs=1, collection_step_num_env_steps=5, batch_size=5, buffer_size=5,
    )  # fmt: skip


def tianshou_dqn() -> None:
    """One environment, a gradient step every 4 policy steps."""
    from tianshou.highlevel.params.algorithm_params import DQNParams

    params = DQNParams(lr=1e-4, target_update_freq=500, eps_training=0.05, is_double=False)
    _tianshou(
        "DQN", "CartPole-v1", params, (64, 64), None, epoch_num_steps=49_000, num_training_envs=1,
        collection_step_num_env_steps=4, batch_size=64, buffer_size=50_000, start_timesteps=1_000,
        start_timesteps_random=True, update_step_num_gradient_steps_per_sample=0.25,
    )  # fmt: skip


def tianshou_sac() -> None:
    """Four environments, a gradient step every 4 policy steps."""
    from tianshou.highlevel.params.algorithm_params import SACParams
    from tianshou.highlevel.params.alpha import AutoAlphaFactoryDefault

    params = SACParams(
        alpha=AutoAlphaFactoryDefault(lr=3e-4), actor_lr=3e-4, critic1_lr=3e-4, critic2_lr=3e-4
    )
    _tianshou(
        "SAC", "LunarLanderContinuous-v3", params, (256, 256), "common_critic",
        epoch_num_steps=23_000, num_training_envs=4, collection_step_num_env_steps=4,
        batch_size=256, buffer_size=65_536, start_timesteps=1_000, start_timesteps_random=True,
        update_step_num_gradient_steps_per_sample=0.25,
    )  # fmt: skip


def tianshou_td3() -> None:
    """One environment, a gradient step each policy step."""
    from tianshou.highlevel.params.algorithm_params import TD3Params

    params = TD3Params(actor_lr=1e-3, critic1_lr=1e-3, critic2_lr=1e-3)
    _tianshou(
        "TD3", "HalfCheetah-v5", params, (256, 256), "common_critic", epoch_num_steps=5_000,
        num_training_envs=1, collection_step_num_env_steps=1, batch_size=256, buffer_size=65_536,
        start_timesteps=1_000, start_timesteps_random=True,
        update_step_num_gradient_steps_per_sample=1.0,
    )  # fmt: skip


RUNS: dict[str, dict[str, Callable[[], None]]] = {
    "stable_baselines3": {
        "PPO, CartPole": partial(sb3_ppo, "CartPole-v1", 65_536, 1, 128, 64, 10),
        "PPO, 8 x CartPole": partial(sb3_ppo, "CartPole-v1", 262_144, 8, 128, 256, 4),
        "PPO, HalfCheetah": partial(sb3_ppo, "HalfCheetah-v5", 40_960, 1, 2_048, 64, 10),
        "A2C, CartPole": sb3_a2c_cartpole,
        "Recurrent PPO, 8 x CartPole": sb3_recurrent,
        "DQN, CartPole": sb3_dqn_cartpole,
        "SAC, 4 x LunarLanderContinuous": sb3_sac_lander,
        "TD3, HalfCheetah": sb3_td3_halfcheetah,
        "TD3, HalfCheetah, 2 threads": sb3_td3_halfcheetah,
        "PPO, 8 x Pong": sb3_ppo_pong,
    },
    "tianshou": {
        "PPO, CartPole": partial(tianshou_ppo, "CartPole-v1", 65_536, 1, 128, 64, 10),
        "PPO, 8 x CartPole": partial(tianshou_ppo, "CartPole-v1", 262_144, 8, 1_024, 256, 4),
        "PPO, HalfCheetah": partial(tianshou_ppo, "HalfCheetah-v5", 40_960, 1, 2_048, 64, 10),
        "A2C, CartPole": tianshou_a2c,
        "DQN, CartPole": tianshou_dqn,
        "SAC, 4 x LunarLanderContinuous": tianshou_sac,
        "TD3, HalfCheetah": tianshou_td3,
        "TD3, HalfCheetah, 2 threads": tianshou_td3,
    },
}
"""By library and case."""


def main(library: str, case: str) -> None:
    """Run once, and print the steps of the first optimiser."""
    counts: dict[int, int] = {}

    def count(optimizer: Any, *_: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    register_optimizer_step_post_hook(count)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        RUNS[library][case]()
    print(max(counts.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
