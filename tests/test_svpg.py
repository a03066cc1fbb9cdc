"""Particles: policies in one batched pass, coupled as Liu et al. (2017) write."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from kit.envs import make_env
from kit.evaluate import SavedRun
from kit.experiment import EnvConfig, OnPolicySteps
from kit.losses import SteinGradients
from kit.losses.svpg import svpg_directions
from kit.modules import Particles, make_actor_critic, make_particles
from kit.steps import StepPlan
from recipes import a2c, svpg
from tests.errors import raises_setting
from tests.tiny import weights

_identity = id  # a parameter of a test has this name
PLAN = StepPlan(total_policy_steps=64, num_envs=8, steps_per_env=8)


def by_hand(particles, scores, temperature):
    """SVPG's directions in plain Python, entry by entry."""
    n, size = particles.shape
    x, s = particles.tolist(), scores.tolist()

    def squared(i, j):
        return sum((a - b) ** 2 for a, b in zip(x[i], x[j]))

    pairs = sorted(squared(i, j) for i in range(n) for j in range(i))
    half = len(pairs) // 2
    median = pairs[half] if len(pairs) % 2 else (pairs[half - 1] + pairs[half]) / 2
    h = median / math.log(n + 1)
    directions = [[0.0] * size for _ in range(n)]
    for i in range(n):
        for j in range(n):
            k = math.exp(-squared(j, i) / h)
            for d in range(size):
                derivative = -2 / h * (x[j][d] - x[i][d]) * k  # of k(x_j, x_i) by x_j
                directions[i][d] += (s[j][d] * k / temperature + derivative) / n
    return torch.tensor(directions, dtype=torch.float64)


# ---------------------------------------------------------------------- the update
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_directions_match_reference_implementation(n):
    numbers = torch.Generator().manual_seed(n)
    particles, scores = torch.randn(2, n, 11, generator=numbers, dtype=torch.float64)
    found = svpg_directions(particles, scores, temperature=0.3)
    torch.testing.assert_close(found, by_hand(particles, scores, 0.3), rtol=1e-12, atol=1e-12)


def test_directions_do_not_repel_single_or_equal_particles():
    particle, score = torch.randn(2, 1, 6)
    torch.testing.assert_close(svpg_directions(particle, score, 1.0), score)
    scores = torch.randn(3, 6)
    found = svpg_directions(particle.expand(3, -1), scores, 1.0)
    torch.testing.assert_close(found, scores.mean(0).expand(3, -1))


def test_stein_gradients_couple_policies_but_not_critics():
    networks = [nn.Linear(3, 2).double() for _ in range(4)]
    policy, critic = Particles(networks), Particles([nn.Linear(3, 1).double() for _ in range(4)])
    seen = torch.randn(8, 3, dtype=torch.float64)
    targets = torch.randn(8, 1, dtype=torch.float64)
    total = (policy(seen).tanh().sum(-1) + (critic(seen) - targets).square().sum(-1)).mean()
    parameters = [*policy.parameters(), *critic.parameters()]
    change = SteinGradients(policy, temperature=0.5)
    changed = change(parameters, torch.autograd.grad(total, parameters))

    own = []
    for network, rows in zip(networks, seen.split(2)):
        loss = network(rows).tanh().sum(-1).mean()
        parts = torch.autograd.grad(loss, list(network.parameters()))
        own.append(torch.cat([part.flatten() for part in parts]))
    flat = torch.stack(
        [torch.cat([p.detach().flatten() for p in network.parameters()]) for network in networks]
    )
    expected = -by_hand(flat, -torch.stack(own), 0.5)
    found = torch.cat([gradient.flatten(1) for gradient in changed[:2]], 1)
    torch.testing.assert_close(found, expected)

    loss = (critic(seen) - targets).square().sum(-1).mean()
    plain = torch.autograd.grad(4 * loss, list(critic.parameters()))
    torch.testing.assert_close(list(changed[2:]), list(plain))


# ---------------------------------------------------------------------- particles
@pytest.mark.parametrize(
    "sizes", [[1] * 4, [2] * 4, [3, 2, 3, 2], [3, 2, 2, 2], [2, 1, 2, 1], [1, 1, 1, 0]], ids=str
)
def test_particles_process_separate_blocks_of_rows(sizes):
    networks = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(4)]
    seen = torch.randn(sum(sizes), 6, 3)
    expected = [network(part) for network, part in zip(networks, seen.split(sizes))]
    torch.testing.assert_close(Particles(networks)(seen), torch.cat(expected))


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("shared", [False, True])
def test_stacked_actors_and_critics_match_separate_networks(id, shared):
    env = make_env(id, 8)
    make = functools.partial(make_actor_critic, env, [8], shared_backbone=shared)
    with torch.random.fork_rng():
        stacked = make_particles(make, 4, PLAN)
    separate = [make() for _ in range(4)]  # from the same random numbers
    seen = TensorDict({"observation": torch.randn(8, *env.observation_leaves[0].shape)}, [8])
    (action, *_), written = stacked[0].module, ("logits", "loc", "state_value")
    alone = [[actor.module[0], critic] for actor, critic in separate]
    for number, network in enumerate([action, stacked[1]]):
        found = network(seen.copy())
        parts = [one[number](rows.copy()) for one, rows in zip(alone, seen.split(2))]
        (key,) = [key for key in written if key in found.keys()]
        torch.testing.assert_close(found[key], torch.cat([part[key] for part in parts]))
    stacks = {
        _identity(m) for network in stacked for m in network.modules() if type(m) is Particles
    }
    assert len(stacks) == (3 if shared else 2)


# ---------------------------------------------------------------------- runs
def built(log_dir=None, **changes):
    """Four iterations of 8 environments for 4 particles."""
    steps = OnPolicySteps(
        total_policy_steps=256, steps_per_env=8, update_epochs=1, minibatch_size=None,
        evaluation_every=None, evaluation_episodes=6,
    )  # fmt: skip
    env = EnvConfig("CartPole-v1", 8)
    settings = {
        "steps": steps,
        "env": env,
        "hidden_sizes": [8],
        "progress": False,
        "log_dir": log_dir,
    }
    return svpg.build(svpg.Config(**{**settings, **changes}))


def test_policy_step_counts_one_action_of_one_particle():
    trainer = built()
    batches = []
    trainer.register_op("pre_steps_log", lambda batch: batches.append(batch.clone()) or {})
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert (ledger.policy_steps, ledger.env_steps, ledger.gradient_steps) == (256, 256, 4)
    assert ledger.samples == 256
    # Each particle acts 64 times: of 8 environments, 2 are its own, for 32 steps.
    assert sum(batch[:2].numel() for batch in batches) == 64


def test_minibatches_contain_equal_share_of_each_particle():
    steps = OnPolicySteps(
        total_policy_steps=256, steps_per_env=8, minibatch_size=16, update_epochs=10
    )
    trainer = built(steps=steps, loss="ClipPPOLoss")
    seen = []

    def look(minibatch):
        seen.append(minibatch["observation"].clone())
        return minibatch

    batch = []
    trainer.register_op("pre_epoch", lambda data: batch.append(data["observation"].clone()))
    trainer.register_op("process_optim_batch", look)
    ledger = trainer.run()
    assert ledger.gradient_steps == 4 * 10 * 4
    assert ledger.compare(trainer.plan) == []
    own = [{tuple(row.tolist()) for row in part.reshape(-1, 4)} for part in batch[0].split(2)]
    for minibatch in seen[:4]:
        for particle, rows in enumerate(minibatch.split(4)):
            assert {tuple(row.tolist()) for row in rows} <= own[particle]
    assert sum(len(minibatch) for minibatch in seen[:4]) == 64


def test_single_particle_matches_a2c():
    same = {
        "entropy_coeff": 0.0, "max_grad_norm": None, "learning_rate": 1e-2, "hidden_sizes": [8],
        "lr_schedule": "constant",
    }  # fmt: skip
    one = built(num_particles=1, temperature=1.0, **same)
    one.run()
    plain = a2c.build(
        a2c.Config(
            env=EnvConfig("CartPole-v1", 8), steps=one.plan, log_dir=None, progress=False,
            optimizer="adam", gae_lambda=0.95, gamma=0.99, normalize_advantage=False, **same,
        )
    )  # fmt: skip
    plain.optimizer.param_groups[0]["eps"] = 1e-5
    plain.run()
    for ours, theirs in zip(weights(one).values(), weights(plain).values()):
        ours = ours if ours.shape == theirs.shape else ours[0]  # the one that is stacked
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_evaluation_reports_each_particle_and_best_return():
    trainer = built()
    columns = trainer.evaluate(0)  # 6 episodes of 4 particles
    returns = [columns[f"evaluation/return_particle_{n}"] for n in range(4)]
    assert columns["evaluation/return_best"] == max(returns)
    every_row = [returns[n] for n in (0, 0, 1, 2, 2, 3)]
    assert columns["evaluation/return"] == pytest.approx(sum(every_row) / 6)


def test_saved_run_evaluates_each_of_many_particles(tmp_path):
    steps = OnPolicySteps(33, steps_per_env=1, update_epochs=1, minibatch_size=None)
    env = EnvConfig("CartPole-v1", 33)
    trainer = built(str(tmp_path), num_particles=33, env=env, steps=steps)
    trainer.run()
    columns = SavedRun(trainer.folder).evaluator(33, seed=0)()
    assert {f"evaluation/return_particle_{n}" for n in range(33)} <= columns.keys()


# ---------------------------------------------------------------------- as they learn
@pytest.mark.nightly
def test_best_particle_solves_cartpole_in_102_400_policy_steps():
    config = svpg.Config(log_dir=None, progress=False)
    config.steps.evaluation_every, config.steps.evaluation_episodes = None, 100
    trainer = svpg.build(config)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert ledger.policy_steps == 4 * 102_400
    assert trainer.journal.latest["evaluation/return_best"] >= 475.0


# ---------------------------------------------------------------------- what is refused
STEPS = {"total_policy_steps": 256, "steps_per_env": 8}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_particles": 3}, "env.num_envs"),
        ({"num_particles": 65}, "num_particles"),
        ({"temperature": 0.0}, "temperature"),
        ({"steps": OnPolicySteps(**STEPS, minibatch_size=18)}, "steps.minibatch_size"),
        ({"steps": OnPolicySteps(256, steps_per_env=None, min_steps=64)}, "steps.steps_per_env"),
        (
            {"steps": OnPolicySteps(**STEPS, minibatch_size=4, sequence_length=4)},
            "steps.sequence_length",
        ),
    ],
)
def test_build_rejects_invalid_particle_settings(changes, field):
    with raises_setting(field):
        built(**changes)


def test_make_particles_rejects_recurrent_networks():
    env = make_env("CartPole-v1", 8)
    make = {"shared_backbone": True, "recurrent": "gru"}
    with raises_setting("recurrent"):
        make_particles(lambda: make_actor_critic(env, [8], **make), 4, PLAN)
