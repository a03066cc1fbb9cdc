"""A resumed run explores as it would have: noise scales belong to the checkpoint."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import EGreedyModule

from kit.envs import make_env
from kit.hooks import AnnealExploration, Hook
from kit.modules.exploration import GaussianNoise, OrnsteinUhlenbeckNoise
from kit.trainer import Trainer
from tests.tiny import collector_of, off_policy_plan

pytestmark = pytest.mark.filterwarnings("ignore:the policy runs eagerly")


def egreedy(spec):
    return EGreedyModule(spec=spec, eps_init=1.0, eps_end=0.1, annealing_num_steps=40)


def gaussian(spec):
    return GaussianNoise(spec=spec, sigma_init=1.0, sigma_end=0.1, annealing_num_steps=40)


def ornstein_uhlenbeck(spec):
    return OrnsteinUhlenbeckNoise(spec=spec, eps_init=1.0, eps_end=0.1, annealing_num_steps=40)


NOISES = {
    "egreedy": (egreedy, "CartPole-v1", "eps"),
    "gaussian": (gaussian, "Pendulum-v1", "sigma"),
    "ornstein_uhlenbeck": (ornstein_uhlenbeck, "Pendulum-v1", "eps"),
}


class StepsNoise(Hook):
    """Anneals exploration as TorchRL's scripts do: by the module's own counter."""

    kind = "step"

    def __init__(self, noise):
        self.noise = noise

    def register(self, trainer, name=None):
        super().register(trainer, name)
        trainer.register_op("post_steps", self.noise.step)


def build(kind, hook, steps=40, before_the_policy=False, **parts):
    """A run that trains nothing, whose policy moves by its noise alone; and the noise."""
    make_noise, env_id, _ = NOISES[kind]
    plan = off_policy_plan(
        total_policy_steps=steps,
        learning_starts=0,
        replay_ratio=None,
        exploration_steps=before_the_policy * steps,
    )
    env = make_env(env_id, 1, seed=0)
    noise = make_noise(env.full_action_spec if kind != "egreedy" else env.action_spec)
    choices = 1 if kind != "egreedy" else None

    def act(observation):
        shape = observation.shape[:-1]
        return torch.zeros(*shape, 1) if choices else torch.ones(shape, dtype=torch.int64)

    module = TensorDictModule(act, ["observation"], ["action"])
    policy = TensorDictSequential(module, noise)
    acting = {"seed": 1, "init_random_frames": 0}
    if before_the_policy:
        acting |= {"exploration_policy": policy, "exploration_frames": steps}
        policy = TensorDictSequential(module)
    collector = collector_of(plan, env, policy, **acting)
    trainer = Trainer(plan, collector=collector, loss_module=nn.Module(), **parts)
    trainer.add(hook(noise))
    seen = []
    trainer.register_op("batch_process", lambda batch: seen.append(batch["action"].clone()))
    return trainer, noise, seen


@pytest.mark.parametrize("before_the_policy", [False, True])
@pytest.mark.parametrize("hook", [StepsNoise, AnnealExploration])
@pytest.mark.parametrize("kind", list(NOISES))
def test_resumed_run_restores_noise_and_repeats_actions(kind, hook, before_the_policy, tmp_path):
    how = {"before_the_policy": before_the_policy}
    whole, at_the_end, wanted = build(kind, hook, **how, folder=tmp_path, checkpoint_every=20)
    whole.run()
    attribute = NOISES[kind][2]
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[0]
    resumed, noise, seen = build(kind, hook, **how, resume_from=checkpoint)
    assert 0.1 < float(getattr(noise, attribute)) < 1.0
    resumed.run()
    assert float(getattr(noise, attribute)) == float(getattr(at_the_end, attribute)) < 0.2
    assert len(seen) == 20
    assert torch.equal(torch.cat(seen), torch.cat(wanted[20:]))
