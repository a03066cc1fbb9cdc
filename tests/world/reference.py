"""One gradient step of DreamerV3 whose weights, minibatch and random numbers are fixed.

``benchmarks/sheeprl_figures.py`` computes it with sheeprl and writes what it finds beside this
file; the tests compute it with the kit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import SoftUpdate

from kit.envs import make_env
from kit.losses import DreamerV3Loss
from kit.modules.world import LatentActor, Size, WorldModel, make_latent_critic
from kit.modules.world.layers import sample_one_hot

FIGURES = Path(__file__).with_name("sheeprl.npz")
SIZE = Size(deter=32, hidden=8, classes=4, units=8, depth=2, stoch=4, blocks=2)
SEQUENCES, TIME, HORIZON, SIDE = 3, 6, 4, 16
CASES = ("choices", "numbers", "images")
"""One choice as the action, and sequences that begin with stored latents; one vector of numbers as
the action; an image as the observation."""


class Described(gym.Env[Any, Any]):
    """Spaces, and nothing that happens in them."""

    def __init__(self, case: str) -> None:
        image = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        vector = spaces.Box(-np.inf, np.inf, (5,), np.float32)
        self.observation_space = image if case == "images" else vector
        numbers = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = numbers if case == "numbers" else spaces.Discrete(3)


class Noise(NamedTuple):
    """Random numbers of one gradient step."""

    posterior: Tensor
    """uniform, ``[time, sequences, latents]``."""
    prior: Tensor
    """uniform, ``[horizon, rows, latents]``."""
    action: Tensor
    """uniform of choices, standard normal of numbers, ``[horizon + 1, rows, *]``."""


class Figures(NamedTuple):
    """What one gradient step has found."""

    losses: dict[str, Any]
    """by name; joined by + where they are given together."""
    gradients: dict[str, Any]
    """of the sum of all losses, by parameter."""


class Step(NamedTuple):
    """What one gradient step is computed from."""

    loss: DreamerV3Loss
    minibatch: TensorDict
    """``[sequences, time]``"""
    noise: Noise


def make_step(case: str) -> Step:
    """A loss with its weights, a minibatch and random numbers, all from one seed."""
    rng = np.random.default_rng(CASES.index(case))
    if f"kit/Described-{case}-v0" not in gym.registry:
        gym.register(f"kit/Described-{case}-v0", lambda: Described(case))
    model = WorldModel(make_env(f"kit/Described-{case}-v0"), SIZE)
    actor = LatentActor(model.code, model.features, SIZE)
    settings: dict[str, Any] = {"imagination_horizon": HORIZON, "stored_latents": case == "choices"}
    loss = DreamerV3Loss(model, actor, make_latent_critic(model), **settings)
    SoftUpdate(loss, tau=0.02)
    with torch.no_grad():
        for name, parameter in parameters(loss):
            parameter.copy_(_weights(rng, name, parameter))
    rows = SEQUENCES * TIME
    shape = () if model.code.discrete else (model.code.features,)
    draw = rng.random if model.code.discrete else rng.standard_normal
    posterior = rng.random((TIME, SEQUENCES, SIZE.stoch))
    prior = rng.random((HORIZON, rows, SIZE.stoch))
    noise = Noise(*map(_single, (posterior, prior, draw((HORIZON + 1, rows, *shape)))))
    return Step(loss, _minibatch(rng, case), noise)


def parameters(loss: DreamerV3Loss) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name; those of the slow critic come last."""
    trained = dict(loss.named_parameters())
    yield from trained.items()
    slow, critic = loss.target_critic_network_params.flatten_keys("."), "critic_network_params."
    for name in (name.removeprefix(critic) for name in trained if name.startswith(critic)):
        yield f"slow.{name}", slow[name].data


def _single(values: Any) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.float32))


def _weights(rng: np.random.Generator, name: str, like: Tensor) -> Tensor:
    """Weights as after some training: none is zero, expected rewards are about 3, values 0."""
    drawn = _single(rng.uniform(-1, 1, like.shape))
    if name.endswith("bias"):
        middle = 0.07 if "reward_head" in name else 0.0
        bins = torch.linspace(-1, 1, len(like)) - middle if len(like) == 255 else torch.zeros(())
        return 0.1 * drawn - 200 * bins.square()
    if like.ndim == 1:
        return 1 + 0.3 * drawn
    inputs = like.shape[1] if like.ndim == 3 else like[0].numel()
    return 3 * drawn / inputs**0.5


def _minibatch(rng: np.random.Generator, case: str) -> TensorDict:
    """Records of sequences in which episodes end."""
    shape = (SEQUENCES, TIME)
    done = rng.random((*shape, 1)) < 0.3
    is_init = np.roll(done, 1, 1)
    is_init[:, 0] = [[False], [True], [False]] if case == "choices" else True
    numbers = 3 * rng.standard_normal((*shape, 5)), rng.uniform(-2, 2, (*shape, 2))
    image = torch.as_tensor(rng.integers(256, size=(*shape, SIDE, SIDE, 3)).astype(np.uint8))
    choice = torch.as_tensor(rng.integers(3, size=shape))
    flags = {"done": done, "terminated": done & (rng.random(done.shape) < 0.5), "is_init": is_init}
    latent = {
        "deter": _single(rng.uniform(-1, 1, (SEQUENCES, SIZE.deter))).half(),
        "stoch": torch.as_tensor(rng.integers(SIZE.classes, size=(SEQUENCES, SIZE.stoch))).short(),
    }
    before = TensorDict({"latent": latent, "action": choice[:, -1]}, [SEQUENCES])
    return TensorDict(
        {
            "before": before.unsqueeze(1).expand(shape),
            "observation": image if case == "images" else _single(numbers[0]),
            "action": _single(numbers[1]) if case == "numbers" else choice,
            "reward": _single(rng.standard_normal((*shape, 1))),
            **{name: torch.as_tensor(flag) for name, flag in flags.items()},
        },
        shape,
    )


def sample_action(actor: LatentActor, columns: Tensor, noise: Tensor) -> Tensor:
    """Encoded actions from given random numbers."""
    columns = columns.detach()
    if actor.code.discrete:
        return sample_one_hot(columns.exp(), noise)
    mean, deviation = columns.chunk(2, -1)
    return mean + deviation * noise


def kit_step(step: Step) -> Figures:
    """What the kit finds."""
    loss, minibatch, noise = step
    rows, actions = iter(noise[:2]), iter(noise.action)
    given = {
        "noise": lambda *_, **__: next(rows),
        "sample": lambda columns: sample_action(loss.actor, columns, next(actions)),
    }
    with (
        patch.object(loss.world_model.rssm, "noise", given["noise"]),
        patch.object(loss.actor, "sample", given["sample"]),
    ):
        outputs = loss(minibatch)
    losses = {name: value for name, value in outputs.items() if name.startswith("loss_")}
    named = dict(loss.named_parameters())
    gradients = torch.autograd.grad(sum(losses.values()), list(named.values()))
    found = {name: value.detach() for name, value in losses.items()}
    return Figures(found, dict(zip(named, gradients)))


def differences(found: Figures, wanted: Figures) -> Figures:
    """Relative differences from what is wanted; of gradients, that of the norms.

    Args:
        found: by the kit.
        wanted: for all parameters that the kit trains.
    """
    losses = {
        names: abs(float(sum(found.losses[name] for name in names.split("+")) / value) - 1)
        for names, value in wanted.losses.items()
    }
    gradients = {
        name: float((gradient - wanted.gradients[name]).norm() / wanted.gradients[name].norm())
        for name, gradient in found.gradients.items()
    }
    return Figures(losses, gradients)


def stored_figures(case: str) -> Figures:
    """What sheeprl has found."""
    with np.load(FIGURES) as stored:
        mine = {
            name.split("/")[1]: torch.as_tensor(stored[name])
            for name in stored
            if name.startswith(f"{case}/")
        }
    losses = {name: value for name, value in mine.items() if name.startswith("loss_")}
    return Figures(losses, {name: value for name, value in mine.items() if name not in losses})
