"""A trainer that runs its plan again with the trained networks."""

from __future__ import annotations

import pytest
import torch

from kit import EnvConfig, OffPolicySteps, OnPolicySteps
from kit.dialects import Pyrado
from recipes import dqn, ppo
from tests.errors import raises_setting

DQL = Pyrado(
    algo="dql", max_iter=3, memory_size=100, num_init_memory_steps=30, num_updates_per_step=2,
    min_steps=10, batch_size=8, env_max_steps=8, eval_intvl=100, eps_schedule_gamma=0.5,
    use_trained_policy_for_refill=True,
)  # fmt: skip


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.loss_module.parameters()])


def play(trainer):
    """Run the plan, and return the counts and the weights afterwards."""
    return trainer.run().counters(), weights(trainer).clone()


@pytest.mark.slow
def test_reset_repeats_plan_with_trained_networks():
    steps = OnPolicySteps(
        total_policy_steps=60, steps_per_env=5, minibatch_size=5, evaluation_every=30
    )
    trainer = ppo.build(
        ppo.Config(env=EnvConfig(num_envs=2), steps=steps, log_dir=None, progress=False)
    )
    counts, trained = play(trainer)
    trainer.reset(seed=3)
    assert trainer.ledger.policy_steps == 0
    assert torch.equal(weights(trainer), trained)
    again, _ = play(trainer)
    assert {**again, "episodes": 0} == {**counts, "episodes": 0}
    optimizer = trainer.optimizer.state_dict()["state"][0]
    assert optimizer["step"] == 2 * counts["gradient_steps"]


@pytest.mark.slow
def test_reset_seed_determines_run():
    steps = OffPolicySteps(
        total_policy_steps=60, steps_per_env=10, learning_starts=20, minibatch_size=4
    )
    config = dqn.Config(steps=steps, log_dir=None, progress=False)
    runs = [play(dqn.build(config).reset(seed=seed))[1] for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.slow
def test_reset_empties_and_refills_replay_buffer():
    trainer = dqn.build(dqn.Config(steps=DQL, log_dir=None, progress=False))
    counts, _ = play(trainer)
    trainer.reset()
    assert len(trainer.buffer.buffer) == 0
    again, _ = play(trainer)
    assert again["random_policy_steps"] == counts["random_policy_steps"] == 32
    assert len(trainer.buffer.buffer) == again["policy_steps"] - 3  # held back for n-step returns
    trainer.reset(prefill_random=DQL.after_reset().prefill_random)
    refilled, _ = play(trainer)
    assert refilled["random_policy_steps"] == 0
    assert refilled["gradient_steps"] == counts["gradient_steps"] == 6


@pytest.mark.slow
def test_reset_restarts_exploration_schedule():
    trainer = dqn.build(dqn.Config(steps=DQL, log_dir=None, progress=False))
    trainer.run()
    (epsilon,) = trainer.registered_modules["anneal_exploration"].values
    trainer.reset()
    trainer.begin()
    assert epsilon.get() == 1.0
    trainer.shutdown()


def test_reset_rejects_run_folder(tmp_path):
    steps = OnPolicySteps(total_policy_steps=16, steps_per_env=1, minibatch_size=8)
    trainer = ppo.build(ppo.Config(steps=steps, log_dir=str(tmp_path), progress=False))
    with raises_setting("folder"):
        trainer.reset()


def test_reset_rejects_collector_of_torchrl():
    steps = OnPolicySteps(total_policy_steps=16, steps_per_env=1, minibatch_size=8)
    trainer = ppo.build(ppo.Config(steps=steps, collector="torchrl", log_dir=None, progress=False))
    with raises_setting("collector"):
        trainer.reset()
    trainer.shutdown()
