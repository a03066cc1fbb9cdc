"""Running normalisation of torch environments: what the vector path does, without the host."""

from __future__ import annotations

import io

import pytest
import torch

from kit.collectors import TensorCollector, VectorCollector
from kit.envs import EnvError, make_env
from kit.hooks import Evaluator
from kit.modules import make_actor
from kit.testing import (
    COLLECTOR_CHECKS,
    CollectorCase,
    check_collector,
    counter_env,
    counter_policy,
)

BOTH = {"normalize_observation": True, "normalize_reward": True}
COPIES, STEPS = 5, 20
ONE_CASE = (CollectorCase(steps_per_env=18, batches=4),)


def made(kind, id="CartPole-v1", seed=0, normalize=None, **changes):
    """A collector of copies whose episodes have at most 13 steps, so that batches cut them."""
    normalize = BOTH if normalize is None else normalize
    env = make_env(
        id, COPIES, vectorization="tensor", seed=seed, max_episode_steps=13, gamma=0.9, **normalize
    )
    torch.manual_seed(0)
    return kind(env, make_actor(env, hidden_sizes=(8,)), steps_per_env=STEPS, seed=3, **changes)


def collected(collector, batches=4):
    return [collector.collect() for _ in range(batches)]


def statistics(normalizer):
    state = normalizer.state_dict()
    flat = [state.pop("returns")]
    for known in state.values():
        flat += known.values()
    return [torch.as_tensor(value, dtype=torch.float64) for value in flat]


def assert_same(ours, theirs):
    """Equal, numbers to the rounding of float32; trajectories are numbered in another way."""
    for one, other in zip(ours, theirs, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in one.keys(True, True):
            if key != ("collector", "traj_ids"):
                torch.testing.assert_close(one.get(key), other.get(key), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------- the same as on arrays
@pytest.mark.parametrize(
    ("id", "normalize"),
    [
        ("CartPole-v1", BOTH),
        ("Pendulum-v1", {"normalize_observation": True}),
        ("Pendulum-v1", {"normalize_reward": True}),
    ],
)
def test_batches_and_statistics_match_vector_collector(id, normalize):
    tensor, vector = (made(k, id, normalize=normalize) for k in (TensorCollector, VectorCollector))
    assert_same(collected(tensor), collected(vector))
    # Actions agree to the rounding of float32, and so does what they lead to.
    ours, theirs = statistics(tensor.normalizer), statistics(vector.normalizer)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_statistics_match_vector_path_with_reset_at_each_iter():
    tensor, vector = (
        made(k, reset_at_each_iter=True, init_random_frames=0)
        for k in (TensorCollector, VectorCollector)
    )
    assert_same(collected(tensor), collected(vector))
    # One reset and 20 steps of 5 copies for each batch, on top of the first 1e-4.
    assert tensor.normalizer.observation["observation"].count == pytest.approx(420.0001)


def test_statistics_include_episodes_started_by_set_seed():
    collector = made(TensorCollector)
    collector.collect()
    collector.set_seed(7)
    collector.collect()
    assert collector.normalizer.observation["observation"].count == pytest.approx(210.0001)
    assert collector.normalizer.reward.count == pytest.approx(200.0001)


def test_statistics_do_not_count_earlier_reset_twice():
    tensor, vector = made(TensorCollector), made(VectorCollector)
    env = make_env(
        "CartPole-v1", COPIES, vectorization="tensor", max_episode_steps=13, gamma=0.9, **BOTH
    )
    env.start()
    late = TensorCollector(env, tensor.policy, steps_per_env=STEPS, seed=3)
    assert_same(collected(late), collected(vector))


def test_blocks_are_bitwise_equal_to_single_steps():
    blocks, steps = made(TensorCollector, block=7), made(TensorCollector, fast_policy=False)
    for one, other in zip(collected(blocks), collected(steps)):
        assert all(torch.equal(one.get(key), other.get(key)) for key in one.keys(True, True))


def test_finished_episodes_report_raw_rewards():
    collector = made(TensorCollector)
    collected(collector)
    episodes = collector.take_episodes()
    assert episodes
    assert all(episode.episode_return == episode.length for episode in episodes)


def test_traced_program_omits_normalization_ops_when_disabled():
    computed = []
    for normalize in ({}, BOTH):
        collector = made(TensorCollector, normalize=normalize, block=STEPS)
        collected(collector)
        *_, block = collector._steps._blocks.values()
        (program,) = block._programs.values()
        operations = set(program.recording.operations)
        computed.append({"aten.var_mean.correction", "aten.clamp.default"} & operations)
    assert computed == [set(), {"aten.var_mean.correction", "aten.clamp.default"}]


# ---------------------------------------------------------------------- frozen and shared
def test_eval_mode_applies_statistics_without_updating_them():
    collector = made(TensorCollector)
    collected(collector)
    before = statistics(collector.normalizer)
    collector._outer.eval()
    batch = collector.collect()
    assert all(map(torch.equal, before, statistics(collector.normalizer)))
    assert 0.1 < batch["next", "observation"].std() < 10
    collector._outer.train()
    collector.collect()
    assert not torch.equal(before[-1], statistics(collector.normalizer)[-1])


def test_evaluator_uses_current_statistics_without_updating_them():
    tensor, vector = made(TensorCollector), made(VectorCollector)
    returns = []
    for collector in (tensor, vector):
        env = make_env("CartPole-v1", 2, max_episode_steps=50)
        env.normalizer = collector.normalizer  # before anything was collected
        evaluate = Evaluator(env, collector.policy, episodes=4)
        collected(collector)
        before = statistics(collector.normalizer)
        returns.append(evaluate(0))
        assert all(map(torch.equal, before, statistics(collector.normalizer)))
    assert returns[0] == returns[1]


def test_normalizer_state_can_be_loaded_into_new_collector():
    trained, fresh = made(TensorCollector), made(TensorCollector, seed=1)
    collected(trained)
    fresh.normalizer.load_state_dict(trained.normalizer.state_dict())
    assert fresh.normalizer.state_dict() == trained.normalizer.state_dict()


def test_second_collector_of_env_continues_statistics():
    first = made(TensorCollector)
    collected(first)
    second = TensorCollector(first._outer, first.policy, steps_per_env=STEPS)
    second.collect()
    assert second.normalizer.reward.count == pytest.approx(500.0001)


# ---------------------------------------------------------------------- saved
def test_collector_resumes_bitwise_mid_episode():
    whole, saving, going_on = (
        made(TensorCollector),
        made(TensorCollector),
        made(TensorCollector, seed=9),
    )
    expected = collected(whole, 5)[2:]
    collected(saving, 2)
    assert (saving.env.episode_length > 0).any()
    file = io.BytesIO()
    torch.save(dict(saving.state_dict()), file)
    file.seek(0)
    going_on.load_state_dict(torch.load(file, weights_only=True))
    for one, other in zip(expected, collected(going_on, 3), strict=True):
        assert all(torch.equal(one.get(key), other.get(key)) for key in one.keys(True, True))
    ours, theirs = statistics(going_on.normalizer), statistics(whole.normalizer)
    assert all(map(torch.equal, ours, theirs))


# ---------------------------------------------------------------------- faults
@pytest.mark.parametrize("kind", [TensorCollector, VectorCollector])
def test_env_error_names_env_that_returned_nan(kind):
    collector = made(kind)
    collector.collect()
    env = collector.env if kind is TensorCollector else collector.env.backend.env
    env.physics[:, 3] = torch.nan
    with pytest.raises(EnvError, match="env 3, after 20 policy steps: returned NaN"):
        collector.collect()


# ---------------------------------------------------------------------- promises
def normalized(case, **changes):
    env = counter_env(case, "tensor", **BOTH)
    return TensorCollector(
        env,
        counter_policy(env),
        frames_per_batch=case.frames_per_batch,
        total_frames=case.total_frames,
        seed=case.seed,
        fast_policy=case.fast,
        **changes,
    )


def test_collector_passes_all_checks_with_identity_statistics():
    def frozen(case):
        collector = normalized(case)
        collector._outer.eval()
        # Mean 0 and variance 1 move the counts by 5e-9 of themselves; rewards reach 24.
        collector.normalizer.clip = 100.0
        return collector

    assert check_collector(frozen, cases=ONE_CASE) == list(COLLECTOR_CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_matches_single_steps():
    batches, known = [], []
    for fast in (True, False):
        env = make_env("CartPole-v1", 64, vectorization="tensor", device="cuda", **BOTH)
        torch.manual_seed(0)
        policy = make_actor(env, hidden_sizes=(8,)).to("cuda")
        collector = TensorCollector(env, policy, steps_per_env=32, fast_policy=fast)
        batches.append(collected(collector, 3))
        known.append(statistics(collector.normalizer))
    for one, other in zip(*batches):
        for key in ("observation", ("next", "observation"), ("next", "reward")):
            torch.testing.assert_close(one.get(key), other.get(key), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*known, rtol=1e-4, atol=1e-4)
