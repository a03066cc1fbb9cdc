"""Measuring a policy: whole episodes in environments of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType

from kit.collectors.policy import PolicyRunner
from kit.envs.episodes import Episode, EpisodeStatistics
from kit.envs.vector_env import VectorEnv
from kit.steps.errors import whole_number


class Evaluator:
    """Plays whole episodes with deterministic actions and returns their mean and spread.

    Every copy plays its share of the episodes, whether they are short or long, so short ones are
    not preferred. Environments are seeded anew for every evaluation, from ``seed`` and its number:
    the same policy gives the same result, in a resumed run too. Running normalisation is frozen.
    Training is not disturbed: random numbers are put back as they were.

    Args:
        env: environments of its own, in evaluation mode from now on.
        policy: what is measured.
        episodes: played in one evaluation.
        seed: of the environments.
        exploration_type: whether actions are sampled; by default they are not.
        device: where the policy runs.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        episodes: int = 10,
        seed: int = 0,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        device: torch.device | str = "cpu",
    ) -> None:
        self.env = env.eval()
        self.policy = policy
        self.episodes = whole_number("evaluation_episodes", episodes, at_least=1)
        self.seed = seed
        self.device = torch.device(device)
        self._runner = PolicyRunner(
            policy,
            [leaf.key for leaf in env.observation_leaves],
            env.num_envs,
            exploration_type=exploration_type,
        )

    def __call__(self, number: int = 0) -> dict[str, float]:
        """Evaluate once.

        Args:
            number: of this evaluation in its run, from 0; part of the seed.

        Returns:
            Mean, spread (population standard deviation), least and greatest return, mean length in
            policy steps.
        """
        episodes = self.play(number)
        returns = [episode.episode_return for episode in episodes]
        return {
            "evaluation/return": statistics.fmean(returns),
            "evaluation/return_std": statistics.pstdev(returns),
            "evaluation/return_min": min(returns),
            "evaluation/return_max": max(returns),
            "evaluation/length": statistics.fmean(episode.length for episode in episodes),
        }

    def play(self, number: int = 0) -> list[Episode]:
        """Play the episodes of one evaluation and return them."""
        training = isinstance(self.policy, nn.Module) and self.policy.training
        outside = torch.get_rng_state()
        if isinstance(self.policy, nn.Module):
            self.policy.eval()
        try:
            torch.manual_seed(self.seed + number)
            with torch.no_grad():
                return self._play(number)
        finally:
            torch.set_rng_state(outside)
            if isinstance(self.policy, nn.Module):
                self.policy.train(training)

    def _play(self, number: int) -> list[Episode]:
        env, n = self.env, self.env.num_envs
        env.set_seed(int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0]))
        observation = env.start()
        accounts = EpisodeStatistics(n)
        left = np.full(n, self.episodes // n)
        left[: self.episodes % n] += 1
        finished: list[Episode] = []
        self._runner.prepare()
        while left.any():
            tensors = {k: torch.from_numpy(v).to(self.device) for k, v in observation.items()}
            values = self._runner(tensors)
            outputs = dict(zip(self._runner.out_keys, values))
            step = env.new_step()
            env.step_arrays(
                {leaf.key: outputs[leaf.key].cpu().numpy() for leaf in env.action_leaves}, step
            )
            reward = step.reward if step.raw_reward is None else step.raw_reward
            ended = accounts.add(
                reward[None], step.terminated[None], step.truncated[None], step.env_steps[None]
            )
            for episode in ended:
                if left[episode.copy]:
                    left[episode.copy] -= 1
                    finished.append(episode)
            observation = step.observation
        return finished

    def close(self) -> None:
        """Close the environments."""
        self.env.close(raise_if_closed=False)
