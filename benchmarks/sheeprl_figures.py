"""Losses and gradients of sheeprl's DreamerV3, for the tests of the kit's.

    python -m benchmarks.sheeprl_figures

Both compute one gradient step from the same weights, minibatch and random numbers, which
``tests/world/reference.py`` makes. What sheeprl finds is written beside that file, and how far the
kit's is from it is printed. Needs sheeprl 0.8.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import torch
from sheeprl.algos.dreamer_v3_5.agent import RSSM
from torch import Tensor

from benchmarks.sheeprl_dreamer import Agent
from kit.modules.world.layers import sample_one_hot
from tests.world.reference import CASES, FIGURES, Figures, Step, differences, kit_step, make_step


def sheeprl_step(step: Step) -> Figures:
    """Return what sheeprl finds."""
    loss, minibatch, noise = step
    shape = minibatch["observation"].shape[2:]
    agent = Agent(loss, shape, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    latents = iter([*noise.posterior.unsqueeze(1), *noise.prior.unsqueeze(1)])
    actions: Iterator[Tensor] = iter(noise.action)
    distributions = agent.actor.module.distributions

    def sample(logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1)
        sampled = sample_one_hot(probabilities.detach(), next(latents))
        return (sampled + probabilities - probabilities.detach()).flatten(-2)

    def act(state: Tensor, with_actions: bool = True) -> object:
        (found,) = distributions(state)
        if not with_actions:
            return (), (found,)
        if loss.world_model.code.discrete:
            return (sample_one_hot(found.probs, next(actions)),), (found,)
        return (found.mean + found.base_dist.stddev * next(actions),), (found,)

    with (
        patch.object(RSSM, "sample", staticmethod(sample)),
        patch.object(agent.actor.module, "forward", act),
    ):
        agent.step(agent.data(minibatch))
    return Figures(_losses(agent), agent.gradients(loss))


def _losses(agent: Agent) -> dict[str, Tensor]:
    """Losses by the kit's names, times their weights."""
    scales = agent.cfg.algo.loss_scales
    found = {
        "loss_reconstruction": scales.observation * agent.metrics["Loss/observation_loss"],
        "loss_reward": scales.reward * agent.metrics["Loss/reward_loss"],
        "loss_continuation": scales["continue"] * agent.metrics["Loss/continue_loss"],
        "loss_dynamics+loss_representation": agent.metrics["Loss/state_loss"],
        "loss_actor": scales.policy * agent.metrics["Loss/policy_loss"],
        "loss_critic": scales.value * agent.metrics["Loss/value_loss"],
        "loss_replay_critic": scales.replay_value * agent.metrics["Loss/replay_value_loss"],
    }
    return {name: value.detach() for name, value in found.items()}


def main() -> None:
    """Write the figures and print the differences."""
    torch.set_num_threads(1)
    written: dict[str, np.ndarray] = {}
    for case in CASES:
        step = make_step(case)
        wanted = sheeprl_step(step)
        for kind, found in differences(kit_step(step), wanted)._asdict().items():
            worst = max(found, key=lambda name: np.nan_to_num(found[name], nan=np.inf))
            print(f"{case}: {kind} differ by at most {found[worst]:.1e} ({worst})")
        for name, value in (wanted.losses | wanted.gradients).items():
            written[f"{case}/{name}"] = value.numpy()
    np.savez_compressed(FIGURES, **written)


if __name__ == "__main__":
    main()
