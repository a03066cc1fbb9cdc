"""The torch environments on a GPU: the same physics, no waiting, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from kit.envs.tensor import TENSOR_ENVS, make_tensor_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IDS = [id for id in TENSOR_ENVS if "/" not in id]  # without those of kit.testing
every_env = pytest.mark.parametrize("id", IDS)


@pytest.fixture
def no_waiting():
    """Makes CUDA raise where the host would wait for the device."""

    def forbid():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield forbid
    torch.cuda.set_sync_debug_mode("default")


def zero_action(env):
    action = env.action_spec.zero()
    return action + 1 if env.num_actions else action + 0.5


@every_env
def test_gpu_steps_match_cpu_steps(id):
    env = make_tensor_env(id, 500, dtype=torch.float64, seed=0, max_episode_steps=50)
    twin = make_tensor_env(id, 500, dtype=torch.float64, seed=0, max_episode_steps=50)
    twin = twin.to("cuda")
    assert twin.generator.device == twin.physics.device == twin.device
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        twin.physics.copy_(env.physics)
        if env.num_actions:
            action = torch.randint(env.num_actions, (500,), generator=generator)
        else:
            action = torch.rand(500, 1, generator=generator) * 2 - 1
        ours, theirs = env.step_tensors(action), twin.step_tensors(action.cuda())
        for name, cpu, gpu in zip(ours._fields[1:6], ours[1:6], theirs[1:6]):
            assert gpu.is_cuda
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-9, atol=1e-9, msg=name)


@every_env
def test_step_tensors_does_not_synchronise_device(id, no_waiting):
    env = make_tensor_env(id, 500, device="cuda", max_episode_steps=5, action_repeat=2)
    action = zero_action(env)
    no_waiting()
    env.reset_tensors()
    for _ in range(12):
        env.step_tensors(action)


@every_env
def test_captured_cuda_graph_replays_like_eager_steps(id):
    env, twin = (
        make_tensor_env(id, 64, device="cuda", max_episode_steps=5, seed=0) for _ in range(2)
    )
    action = zero_action(env)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            env.step_tensors(action)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        captured = env.step_tensors(action)
    for _ in range(3):
        twin.step_tensors(action)
    saved = env.state_dict()
    for _ in range(12):
        graph.replay()
        for name, one, other in zip(captured._fields, captured, twin.step_tensors(action)):
            assert torch.equal(one, other), name
    # A loaded state is where the graph goes on from: it is written into the same memory.
    env.load_state_dict(saved)
    twin.load_state_dict(saved)
    graph.replay()
    for name, one, other in zip(captured._fields, captured, twin.step_tensors(action)):
        assert torch.equal(one, other), name


def test_restored_env_continues_bitwise():
    env = make_tensor_env("CartPole-v1", 64, device="cuda", max_episode_steps=5, seed=0)
    action = zero_action(env)
    for _ in range(7):
        env.step_tensors(action)
    saved = env.state_dict()
    expected = [env.step_tensors(action) for _ in range(7)]
    other = make_tensor_env("CartPole-v1", 64, device="cuda", max_episode_steps=5, seed=1)
    other.load_state_dict(saved)
    for step in expected:
        for one, two in zip(step, other.step_tensors(action)):
            assert torch.equal(one, two)
