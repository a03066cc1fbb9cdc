"""Parts that users compose, on the simulated device: ``python -m tests.parts_on_a_device NAME``."""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.optim import SGD
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.modules import QValueModule

from kit.buffers import PrioritizedSampler, ReplayMinibatches, make_replay_buffer
from kit.buffers.n_step import NStep
from kit.collectors import VectorCollector
from kit.collectors.policy import PolicyRunner
from kit.envs import Normalizer, make_env
from kit.envs.spaces import Leaf
from kit.fast.nested import leaves
from kit.logging.metrics import MetricMeans
from kit.modules import make_actor, make_q_network
from kit.modules.exploration import EpsilonGreedy, GaussianNoise
from kit.trainer.chunked_state import LARGE, _apart, _together
from kit.update import Update
from tests import simulated_cuda
from tests.losses import make_loss, minibatch_for

CUDA = "cuda"


def batch(steps: int = 6) -> TensorDict:
    seen, done = torch.rand(2, steps + 1, 3), torch.rand(2, steps, 1) < 0.3
    following = {"observation": seen[:, 1:], "reward": torch.rand(2, steps, 1), "done": done}
    rows = {"observation": seen[:, :-1], "next": following | {"terminated": done.clone()}}
    return TensorDict(rows, [2, steps])


def devices(**settings: Any) -> set[str]:
    """Where the entries of a minibatch are, of batches from the device."""
    replay = make_replay_buffer(40, 4, **settings)
    for _ in range(2):
        replay.extend(batch().to(CUDA))
    plan: Any = SimpleNamespace(
        minibatch_size=4, sequence_length=None, minibatches_per_gradient_step=None
    )
    ((minibatch,),) = replay.epoch(plan, 1)
    return {value.device.type for value in minibatch.values(True, True)}


def priorities() -> None:
    """A tree may be elsewhere than the transitions."""
    for tree in ("cpu", CUDA):
        for thin in (False, True):
            sampler = PrioritizedSampler(40, 0.6, 0.4, device=tree)
            settings = {"sampler": sampler, "store_next_observation": not thin}
            assert devices(device=CUDA, **settings) == {"cuda"}
    sampler = PrioritizedSampler(4, 1.0, 0.5, eps=0.0, device=CUDA)
    places = torch.tensor([1, -1, 3], device=CUDA)  # a negative one is left out
    sampler.update_priority(places, torch.tensor([2.0, 9.0, 4.0], device=CUDA))
    assert sampler._sum_tree.values.tolist() == [0, 2, 0, 4]
    assert float(sampler._sum_tree.sums[-1].sum()) == 6


def host() -> None:
    """A memory of the host takes batches of the device."""
    assert devices(store_next_observation=False) == {"cpu"}
    assert devices(folder=tempfile.gettempdir()) == {"cpu"}


def sources() -> None:
    """Batches come from where the caller's buffer and the estimator of advantages need them."""
    listed = TensorDictReplayBuffer(storage=ListStorage(128), batch_size=4)
    unknown = LazyTensorStorage(128, device="auto")  # where the first batch comes from
    as_given = TensorDictReplayBuffer(storage=unknown, batch_size=4)
    on_host = TensorDictReplayBuffer(storage=LazyTensorStorage(128), batch_size=4)
    for buffer in (ReplayMinibatches(listed), ReplayMinibatches(as_given), on_host):
        trained("sac", buffer)
    trained("ppo", make_replay_buffer(32, 8, device=CUDA))


def trained(recipe: str, buffer: Any) -> None:
    """Run a recipe with a replay buffer on the device."""
    simulated_cuda.record_nothing()
    build = importlib.import_module(f"recipes.{recipe}").build
    assert build(simulated_cuda.config_of(recipe), buffer=buffer).run().gradient_steps > 0


def normalized() -> None:
    """Raw minibatches are normalised where they are, as on the host."""
    leaf = Leaf("observation", (), None, (3,), np.dtype(np.float32))
    normalizer = Normalizer([leaf], 2, observation=True, reward=True)
    for moments in (*normalizer.observation.values(), normalizer.reward):
        moments.mean.fill_(0.3)
        moments.var.fill_(0.01)
    one = batch()
    for settings in ({}, {"n_step": 2}, {"device": CUDA}, {"device": CUDA, "n_step": 2}):
        for there in ("cpu", CUDA):
            stores = make_replay_buffer(40, 4, **settings)
            stores.normalize_by(normalizer.to(there))
            for _ in range(2):
                stores.extend(one.to(CUDA) if "device" in settings else one)
            drawn = stores._samples(4, 1)[0]
            raw = stores.buffer.storage.get(drawn["index"])
            entries = {path: value.cpu() for path, value in leaves(raw).items()}
            expected = normalizer.to("cpu").minibatch(entries)
            if stores.n_step is not None:
                summed = stores.n_step.summed(expected["next", "reward"])
                expected["next", "reward"] = summed
            for path in (("observation",), ("next", "observation"), ("next", "reward")):
                assert drawn[path].is_cuda == ("device" in settings)
                torch.testing.assert_close(drawn[path].cpu(), expected[path])


def bytewise() -> None:
    """A memory of the device stores what the host gives, which goes there as one."""

    def numbers(first: int, *size: int) -> torch.Tensor:
        return first + torch.arange(torch.Size(size).numel()).reshape(size)

    def given(first: int) -> TensorDict:
        done = numbers(first, 2, 3, 1) % 5 == 0
        following = {"reward": numbers(first, 2, 3, 1).float(), "done": done, "count": done.byte()}
        rows = {"pixels": numbers(first, 2, 3, 2, 2).byte(), "action": numbers(first, 2, 3)}
        rows |= {"precise": numbers(first, 2, 3) / 3, "alone": numbers(first, 1, 3).expand(2, 3)}
        rows["half"] = numbers(first, 2, 3).half()
        if first:  # stored as the first were
            rows["precise"] = rows["precise"].half()
        return TensorDict(rows | {"next": following}, [2, 3])

    here, there = make_replay_buffer(20, 4), make_replay_buffer(20, 4, device=CUDA)
    for number in range(5):  # the memory is written twice
        batch = given(number * 7)
        here.extend(batch)
        before = simulated_cuda.CROSSINGS.total()
        there.extend(batch)
        once = simulated_cuda.CROSSINGS.total() - before == 1
        assert once or number not in (2, 4)  # the first, and across the end, TorchRL stores
    for path, value in leaves(here.buffer.storage._storage).items():
        other = there.buffer.storage._storage[path]
        assert other.is_cuda
        assert other.dtype is value.dtype
        assert torch.equal(other.cpu(), value), path


def pieces() -> None:
    """Of a large tensor of the device, what has changed is written again."""
    rows = torch.arange(LARGE // 4).reshape(-1, 128).float().to(CUDA)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first, second = Path(one), Path(other)
        _apart({"rows": rows}, first, None)
        rows[3] = 0
        saved = _apart({"rows": rows}, second, first)
        found = _together(saved, second)["rows"]
        assert found.is_cuda
        assert torch.equal(found.cpu(), rows.cpu())
        new = [file for file in second.iterdir() if file.stat().st_nlink == 1]
        assert len(new) == 1
        assert len([*second.iterdir()]) == 4


def numpy() -> None:
    """NumPy acts with the weights and settings that a policy of the device has now."""
    env = make_env("Pendulum-v1", 2)
    noise = GaussianNoise(env.action_spec, sigma_init=0.5, sigma_end=0.5, device=CUDA)
    cartpole, kinds = make_env("CartPole-v1", 2), {"continuous": "tanh_normal"}
    q_network = make_q_network(cartpole).select_out_keys("action")
    greedy = TensorDictSequential(q_network, EpsilonGreedy(cartpole, eps_init=0.5, eps_end=0.5))
    policies = {
        "Pendulum-v1": [make_actor(env), make_actor(env, **kinds), TensorDictSequential(
            make_actor(env, continuous="deterministic"), noise)],
        "CartPole-v1": [make_actor(cartpole), q_network, greedy.select_out_keys("action")],
    }  # fmt: skip
    for id, several in policies.items():
        for policy in several:
            there = copy.deepcopy(policy).to(CUDA)
            follows(VectorCollector(make_env(id, 2), there, steps_per_env=3, device=CUDA), there)
    is_not_copied(nn.LazyLinear(2), "uninitialised")
    is_not_copied(Own(4, 2), "does not support the layer Own")
    hooked = nn.Linear(4, 2)
    hooked.register_forward_hook(Own(4, 2))
    is_not_copied(hooked, "the policy has hooks")


class Own(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("may hold anything")


def is_not_copied(layer: nn.Module, why: str) -> None:
    """A policy of a layer that NumPy does not compute acts on the device."""
    module = TensorDictModule(layer, ["observation"], ["action_value"])
    policy = TensorDictSequential(module, QValueModule(action_space="categorical"))
    collector = VectorCollector(make_env("CartPole-v1", 2), policy, steps_per_env=3, device=CUDA)
    assert why in collector.policy_path.reason, collector.policy_path


def follows(collector: VectorCollector, policy: Any) -> None:
    """A collector's actions are those of the same policy on the host, whatever happens to it."""
    own = copy.deepcopy(policy).to("cpu")
    host = VectorCollector(make_env(collector.env.name, 2), own, steps_per_env=3)

    def alike() -> None:
        found, expected = collector.collect(), host.collect()
        assert collector.policy_path.name == "numpy", collector.policy_path
        assert {*found.keys(True, True)} == {*expected.keys(True, True)}
        for key in found.keys(True, True):
            assert found[key].is_cuda
            torch.testing.assert_close(found[key].cpu(), expected[key])

    alike()
    for one in (policy, own):  # learnt
        for parameter in one.parameters():
            with torch.no_grad():
                parameter.mul_(-1.5)
    alike()
    for one in (policy, own):  # replaced
        layer = next(part for part in one.modules() if type(part) is nn.Linear)
        layer.weight = nn.Parameter(layer.weight.detach() * 2)
        for part in one.modules():
            if isinstance(part, GaussianNoise):
                part.sigma.fill_(0.1)
    alike()


def states() -> None:
    """What was saved on the host goes on on the device."""
    n_step = NStep(3, 0.9)
    n_step(batch())  # steps wait, on the host
    complete = n_step(batch().to(CUDA))
    assert complete is not None
    assert complete["next", "reward"].is_cuda

    def policy(given: TensorDict) -> TensorDict:
        hidden = given.get("hidden", torch.zeros_like(given["x"])) + given["x"] * given["is_init"]
        return given.set(("next", "hidden"), hidden).set("action", hidden)

    here = PolicyRunner(policy, ["x"], 2, fast=False)
    there = PolicyRunner(policy, ["x"], 2, fast=False, device=CUDA)
    with torch.no_grad():
        here({"x": torch.ones(2, 1)})
        there.load_state_dict(here.state_dict())
        there({"x": torch.ones(2, 1, device=CUDA)})
    assert all(value.is_cuda for value in there.hidden.values())


def metrics() -> None:
    """They are read together: a loss may make some on the host, and an optimiser be frozen."""
    means = MetricMeans()
    means.add({"loss": torch.tensor(1.0, device=CUDA), "temperature": torch.tensor(2.0)})
    assert means.take() == {"loss": 1.0, "temperature": 2.0}
    loss = make_loss("SACLoss").to(CUDA)
    networks = {"loss_actor": loss.actor_network_params, "loss_qvalue": loss.qvalue_network_params}
    optimizers = {name: SGD(part.parameters(), 0.1) for name, part in networks.items()}
    update = Update(loss, optimizers | {"loss_alpha": SGD([loss.log_alpha], 0.1)}, compile=False)
    update(minibatch_for("SACLoss").to(CUDA))
    loss.qvalue_network_params.requires_grad_(False)
    found = update(minibatch_for("SACLoss").to(CUDA))
    assert found["grad_norm_qvalue"].is_cuda


if __name__ == "__main__":
    simulated_cuda.install()
    globals()[sys.argv[1]]()
