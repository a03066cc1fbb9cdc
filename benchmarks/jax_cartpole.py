"""CartPole and a policy of two hidden layers in JAX: a compiled scan over time steps.

The same physics, random starts, time limit and autoreset as ``kit.envs.tensor.CartPole``, and the
same batch: observations, actions, log-probabilities, rewards, ends and true next observations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kit.envs.tensor import cartpole as physics

TIME_LIMIT = 500
"""policy steps of the longest episode."""


class Transition(NamedTuple):
    """What one policy step leaves in the batch."""

    observation: Any
    action: Any
    log_prob: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_observation: Any


def move(state: Any, action: Any) -> tuple[Any, Any]:
    """Push the carts for one time step; return their states, and which poles have fallen."""
    _, velocity, angle, spin = state
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    push = jnp.where(action == 1, physics.FORCE, -physics.FORCE) / physics.TOTAL_MASS
    push = push + physics.POLE_SHARE * spin * spin * sine
    inertia = physics.HALF_LENGTH * 4 / 3 - physics.POLE_SHARE * cosine * cosine
    spin_rate = (physics.GRAVITY * sine - cosine * push) / inertia
    acceleration = push - physics.POLE_SHARE * spin_rate * cosine
    rates = jnp.stack((velocity, acceleration, spin, spin_rate))
    state = state + physics.TIME_STEP * rates
    fallen = jnp.abs(state[0]) > physics.POSITION_LIMIT
    return state, fallen | (jnp.abs(state[2]) > physics.ANGLE_LIMIT)


def make_weights(key: Any, sizes: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Return weights and biases as PyTorch draws them."""
    weights = []
    for inputs, outputs in itertools.pairwise(sizes):
        key, one, other = jax.random.split(key, 3)
        bound = 1 / math.sqrt(inputs)
        weights.append((
            jax.random.uniform(one, (inputs, outputs), minval=-bound, maxval=bound),
            jax.random.uniform(other, (outputs,), minval=-bound, maxval=bound),
        ))  # fmt: skip
    return weights


def logits_of(weights: list[tuple[Any, Any]], value: Any, activation: Callable[..., Any]) -> Any:
    """Return the policy's logits."""
    for weight, bias in weights[:-1]:
        value = activation(value @ weight + bias)
    weight, bias = weights[-1]
    return value @ weight + bias


class JaxCartPole:
    """Collects batches with one compiled program each.

    Args:
        num_envs: environments.
        steps: policy steps of each env in a batch.
        activation: of the policy's hidden layers: tanh or relu.
        device: where it runs; JAX's first of this platform: cpu or gpu.
    """

    def __init__(self, num_envs: int, steps: int, activation: str, device: str) -> None:
        self.num_envs, self.steps = num_envs, steps
        self.activation = {"tanh": jnp.tanh, "relu": jax.nn.relu}[activation]
        with jax.default_device(jax.devices(device)[0]):
            self.key, key, other = jax.random.split(jax.random.key(0), 3)
            self.weights = make_weights(key, (4, 64, 64, 2))
            self.state = self.fresh(other)
            self.age = jnp.zeros(num_envs, jnp.int32)
            self.program = jax.jit(self.scan)

    def fresh(self, key: Any) -> Any:
        """Return states of new episodes."""
        return jax.random.uniform(key, (4, self.num_envs), minval=-0.05, maxval=0.05)

    def scan(self, weights: Any, state: Any, age: Any, key: Any) -> tuple[Any, Transition]:
        """Return states afterwards and a batch, time first."""

        def step(carry: Any, key: Any) -> tuple[Any, Transition]:
            state, age = carry
            chance, start = jax.random.split(key)
            logits = jax.nn.log_softmax(logits_of(weights, state.T, self.activation))
            action = jax.random.categorical(chance, logits)
            log_prob = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
            after, terminated = move(state, action)
            age = age + 1
            truncated = age >= TIME_LIMIT
            done = terminated | truncated
            reward = jnp.ones(self.num_envs)
            kept = Transition(state.T, action, log_prob, reward, terminated, truncated, after.T)
            return (jnp.where(done, self.fresh(start), after), jnp.where(done, 0, age)), kept

        return jax.lax.scan(step, (state, age), jax.random.split(key, self.steps))

    def __call__(self) -> Transition:
        """Collect a batch and wait for it."""
        self.key, key = jax.random.split(self.key)
        (self.state, self.age), batch = self.program(self.weights, self.state, self.age, key)
        return jax.block_until_ready(batch)
