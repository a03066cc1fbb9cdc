"""Prioritised replay: the paper's formulas, with Numba's tree and that of tensors."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data import PrioritizedSampler as TorchRLPrioritizedSampler

from kit.buffers import (
    PrioritizedSampler,
    SliceWriter,
    make_replay_buffer,
    priorities,
    priority_trees,
)
from kit.buffers.priorities import make_priority_tree
from kit.buffers.priority_trees import PriorityTree
from kit.steps import SettingError
from kit.trainer import Trainer
from kit.trainer.stages import HookError
from tests.errors import raises_setting
from tests.tiny import off_policy_plan, sac_parts

KINDS: dict = {"tensors": PriorityTree}
with contextlib.suppress(ImportError):
    from kit.buffers.numba_tree import NumbaPriorityTree

    KINDS["Numba"] = NumbaPriorityTree


@pytest.fixture(params=["tensors", "Numba"])
def kind(request):
    """The tree for any device, and the one of the host."""
    if request.param not in KINDS:
        pytest.skip("there is no Numba")
    return KINDS[request.param]


@pytest.fixture(params=["one level", "several levels", "Numba"])
def any_kind(request, monkeypatch):
    """The trees, and that of tensors with a fan-out so small that it has several levels."""
    if request.param == "several levels":
        monkeypatch.setattr(priority_trees, "_FAN_OUT", 4)
        monkeypatch.setattr(priority_trees, "_WIDEST_ROOT", 5)
    if request.param == "Numba" and "Numba" not in KINDS:
        pytest.skip("there is no Numba")
    return KINDS["Numba" if request.param == "Numba" else "tensors"]


@pytest.fixture
def any_tree(kind, monkeypatch):
    """Samplers with each of the trees."""
    monkeypatch.setattr(
        priorities,
        "make_priority_tree",
        lambda size, device: kind(size),
    )


def filled_tree(
    size: int, seed: int, kind: type[PriorityTree], changes: int = 3
) -> tuple[PriorityTree, torch.Tensor]:
    """A tree after some batches of changes, and its values; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    tree, values = kind(size), torch.zeros(size, dtype=torch.float64)
    for _ in range(changes):
        count = int(torch.randint(1, size + 1, (), generator=generator))
        places = torch.randperm(size, generator=generator)[:count]
        new = torch.rand(count, generator=generator, dtype=torch.float64)
        new[torch.rand(count, generator=generator) < 0.2] = 0.0
        values[places] = new
        write(tree, places, new)
    return tree, values


def write(tree: PriorityTree, places: torch.Tensor, values: torch.Tensor) -> None:
    tree[tree.array(places)] = tree.array(values)


def found(tree: PriorityTree, share: torch.Tensor) -> torch.Tensor:
    places, values = tree.find(tree.array(share))
    assert torch.equal(torch.as_tensor(values), torch.as_tensor(tree[places]))
    return torch.as_tensor(places)


def total(tree):
    return float(tree.sums[-1].sum()) if type(tree) is PriorityTree else tree.sum


# ---------------------------------------------------------------------- the tree
@pytest.mark.parametrize("size", [1, 150, 20_000])
def test_tree_tracks_sum_and_minimum_after_updates(any_kind, size):
    for seed in range(4):
        tree, values = filled_tree(size, seed, any_kind)
        assert torch.equal(tree.values, values)
        assert total(tree) == pytest.approx(float(values.sum()))
        positive = values[values > 0]
        assert float(tree.min()) == (float(positive.min()) if len(positive) else torch.inf)


@pytest.mark.parametrize("size", [5, 150, 3_000])
def test_tree_finds_value_by_share_of_sum(any_kind, size):
    for seed in range(4):
        tree, values = filled_tree(size, seed, any_kind)
        reached = values.cumsum(0)
        # In the middle of each positive value's part, where rounding cannot lead to its neighbour.
        wanted = values.nonzero().flatten()
        share = ((reached - values / 2) / reached[-1])[wanted]
        assert not len(wanted) or torch.equal(found(tree, share), wanted)


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([1e-300, 1e-12, 1.0, 1e12]))
def test_tree_finds_positive_values_at_both_ends_of_sum(seed, scale):
    for kind in KINDS.values():
        tree, values = filled_tree(300, seed, kind)
        if not values.any():
            return
        write(tree, torch.arange(300), values * scale)
        ends = found(tree, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
        positive = values.nonzero().flatten()
        assert ends.tolist() == [int(positive[0]), int(positive[-1])]


def test_tree_accepts_non_contiguous_indices_and_values(kind):
    tree = kind(8)
    places, values = (
        torch.tensor([[1, 7], [3, 7], [5, 7]]),
        torch.tensor([[1.0, 9], [2, 9], [3, 9]]),
    )
    write(tree, places[:, 0], values[:, 0])
    write(tree, torch.tensor([0, 2]), torch.tensor(0.5).expand(2))
    assert tree.values.tolist() == [0.5, 1, 0.5, 2, 0, 3, 0, 0]
    assert total(tree) == 7
    middles = (tree.values.cumsum(0) - tree.values / 2)[tree.values > 0] / 7
    assert found(tree, middles).tolist() == [0, 1, 2, 3, 5]


def test_tree_copy_is_independent(kind):
    tree, values = filled_tree(3_000, 0, kind)
    other = pickle.loads(pickle.dumps(tree))
    write(tree, torch.arange(3_000), torch.zeros(3_000))
    assert torch.equal(other.values, values)
    assert float(other.min()) == float(values[values > 0].min())
    assert total(other) == pytest.approx(float(values.sum()))


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_tree_rejects_non_positive_or_non_finite_sum(kind, value):
    tree = kind(8)
    write(tree, torch.arange(8), torch.full((8,), value))
    with raises_setting("priorities"):
        found(tree, torch.tensor([0.0, 0.5], dtype=torch.float64))


def test_tree_limits_return_index_and_value_range_with_nan(kind):
    tree = kind(8)
    places, values = torch.tensor([4, -1, 7]), torch.tensor([0.5, 0.25, 2.0])
    least, most, lowest, highest = tree.limits(tree.array(places), tree.array(values))
    assert (least, most, float(lowest), float(highest)) == (-1, 7, 0.25, 2.0)
    for at in range(3):
        one = values.index_fill(0, torch.tensor([at]), torch.nan)
        assert np.isnan(float(tree.limits(tree.array(places), tree.array(one))[-1]))


def test_restored_sampler_draws_are_bitwise_equal(any_tree):
    one, other = (PrioritizedSampler(5_000, alpha=0.6, beta=0.4) for _ in range(2))
    for _ in range(20):
        one.update_priority(torch.randint(5_000, (64,)).unique(), torch.rand(()) * 10)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one._sum_tree.values, other._sum_tree.values)
    assert total(one._sum_tree) == total(other._sum_tree)
    share = torch.rand(10_000, dtype=torch.float64)
    assert torch.equal(found(one._sum_tree, share), found(other._sum_tree, share))


def test_all_tree_kinds_find_same_indices():
    trees = [filled_tree(5_000, 0, kind)[0] for kind in KINDS.values()]
    share = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, *others = (found(tree, share) for tree in trees)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.skipif("Numba" not in KINDS, reason="there is no Numba")
@settings(max_examples=60)
@given(st.integers(1, 9) | st.integers(1, 3_000) | st.integers(1, 40_000), st.integers(0, 10_000))
def test_numba_tree_matches_numpy_reference(size, seed):
    tree, values = KINDS["Numba"](size), np.zeros(size)
    random = np.random.default_rng(seed)
    for count in (size, 1, 7, 600, 3 * size):  # some places several times: the last value holds
        places = random.integers(0, size, count)
        new = random.integers(0, 5, count).astype(float)  # whose sums are exact
        tree[places] = values[places] = new
        assert np.array_equal(tree[np.arange(size)], values)
        assert tree.sum == values.sum()
        assert tree.min() == values.min(where=values > 0, initial=np.inf)
        if tree.sum:
            share = random.random(100)
            wanted = np.searchsorted(values.cumsum(), share * tree.sum)
            assert np.array_equal(tree.find(share)[0], wanted)


def test_numba_tree_compiles_without_source_file():
    pytest.importorskip("numba")
    source = Path(priority_trees.__file__).with_name("numba_tree.py").read_text()
    module: dict = {}
    exec(compile(source, "<nowhere>", "exec"), module)
    tree = module["NumbaPriorityTree"](3)
    tree[np.arange(3)] = np.array([1.0, 2.0, 4.0])
    assert tree.sum == 7.0


def test_make_priority_tree_uses_tensors_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "kit.buffers.numba_tree", None)
    assert type(make_priority_tree(10, torch.device("cpu"))) is PriorityTree


# ---------------------------------------------------------------------- the formulas
def rows(start: int, count: int) -> TensorDict:
    return TensorDict({"row": torch.arange(start, start + count)}, [count])


def buffer_of(sampler: PrioritizedSampler, size: int = 8) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), writer=SliceWriter(), sampler=sampler, batch_size=4
    )


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.5), (0.6, 0.4), (1.0, 1.0)])
def test_sampling_and_weights_match_paper_formulas(any_tree, alpha, beta):
    errors = torch.tensor([0.5, 2.0, 0.0, 1.0, 4.0])
    buffer = buffer_of(PrioritizedSampler(8, alpha=alpha, beta=beta, eps=0.1))
    buffer.extend(rows(0, 5))
    buffer.update_priority(torch.arange(5), errors)
    priority = (errors.double() + 0.1) ** alpha
    probability = priority / priority.sum()
    torch.manual_seed(0)
    sample = buffer.sample(50_000)
    counts = torch.bincount(sample["row"], minlength=5) / 50_000
    torch.testing.assert_close(counts.double(), probability, atol=0.01, rtol=0)
    weight = (5 * probability) ** -beta
    expected = (weight / weight.max()).float()[sample["row"]]
    torch.testing.assert_close(sample["priority_weight"], expected)


def test_weights_are_normalized_over_buffer_not_minibatch(any_tree):
    """Schaul et al. 2016, section 3.4: the largest weight is that of the least likely row."""
    sampler = PrioritizedSampler(8, alpha=1.0, beta=0.5, eps=0.0)
    buffer = buffer_of(sampler)
    buffer.extend(rows(0, 2))
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 1e12]))
    sample = buffer.sample(4)
    assert sample["row"].tolist() == [1, 1, 1, 1]  # the other row has a probability of 1e-12
    torch.testing.assert_close(sample["priority_weight"], torch.full((4,), 1e-6))


def test_tree_higher_propagates_nan(kind):
    tree = kind(4)
    array = tree.array(torch.tensor([2.0, 3.0, 1.0, torch.nan]))
    highest = None
    for value, expected in zip(array[:3], (2.0, 3.0, 3.0)):
        highest = tree.higher(highest, value)
        assert (float(highest), highest.dtype) == (expected, torch.float32)
    assert tree.higher(highest, array[3]).isnan()


def test_new_transitions_get_highest_priority_so_far(any_tree):
    buffer = buffer_of(PrioritizedSampler(8, alpha=1.0, beta=0.5, eps=0.0))
    buffer.extend(rows(0, 3))
    tree = buffer.sampler._sum_tree
    assert tree.values.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    buffer.update_priority(torch.tensor([0, 2]), torch.tensor([3.0, 0.5]))
    buffer.extend(rows(3, 4))
    assert tree.values.tolist() == [3, 1, 0.5, 3, 3, 3, 3, 0]
    buffer.update_priority(torch.arange(8)[:7], torch.full((7,), 0.25))
    buffer.extend(rows(7, 3))  # the write head passes the end: places 7, 0 and 1
    assert tree.values.tolist() == [3, 3, 0.25, 0.25, 0.25, 0.25, 0.25, 3]


def test_max_priority_within_buffer_uses_only_stored_rows(any_tree):
    sampler = PrioritizedSampler(4, alpha=0.5, beta=0.5, eps=0.0, max_priority_within_buffer=True)
    buffer = buffer_of(sampler, size=4)
    buffer.extend(rows(0, 4))
    buffer.update_priority(torch.arange(4), torch.tensor([9.0, 1.0, 4.0, 1.0]))
    buffer.update_priority(torch.tensor([0]), torch.tensor([2.0]))
    assert float(sampler.default_priority) == pytest.approx(4.0)


def test_sampler_never_draws_unwritten_rows(any_tree):
    buffer = make_replay_buffer(1_000, 64, sampler=PrioritizedSampler(1_000, alpha=0.6, beta=0.4))
    buffer.buffer.extend(rows(0, 3))
    drawn = {int(n) for _ in range(20) for n in buffer.buffer.sample()["row"]}
    assert drawn == {0, 1, 2}


def test_update_priority_ignores_negative_indices(any_tree):
    sampler = PrioritizedSampler(4, alpha=1.0, beta=0.5, eps=0.0)
    sampler.update_priority(torch.tensor([1, -1, 3]), torch.tensor([2.0, 9.0, 4.0]))
    assert sampler._sum_tree.values.tolist() == [0, 2, 0, 4]
    assert float(sampler.default_priority) == 4.0


def test_update_priority_accepts_empty_indices(any_tree):
    sampler = PrioritizedSampler(4, alpha=1.0, beta=0.5, eps=0.0)
    for places in (torch.tensor([], dtype=torch.long), torch.tensor([-1, -1])):
        sampler.update_priority(places, torch.full((len(places),), 9.0))
    assert sampler._sum_tree.values.tolist() == [0, 0, 0, 0]
    assert float(sampler.default_priority) == 1.0


@pytest.mark.parametrize("place", [4, 10**12])
def test_update_priority_rejects_out_of_range_index(any_tree, place):
    sampler = PrioritizedSampler(4, alpha=1.0, beta=0.5)
    with pytest.raises(IndexError, match=f"index {place} is out of range 0 to 3"):
        sampler.update_priority(torch.tensor([1, place]), torch.tensor([2.0, 3.0]))
    assert sampler._sum_tree.values.tolist() == [0, 0, 0, 0]


def test_sampler_supports_two_dimensional_storage(any_tree):
    sampler = PrioritizedSampler(12, alpha=1.0, beta=1.0, eps=0.0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=3, dim_extend=0
    )
    buffer.extend(TensorDict({"row": torch.arange(12).reshape(4, 3)}, [4, 3]))
    places = torch.tensor([[0, 0], [2, 1]])
    sampler.update_priority(
        torch.cartesian_prod(*map(torch.arange, (4, 3))), 0.0, storage=buffer.storage
    )
    sampler.update_priority(places, torch.tensor([1.0, 2.0]), storage=buffer.storage)
    assert {int(n) for _ in range(20) for n in buffer.sample()["row"]} == {0, 7}


def test_changing_alpha_rescales_stored_priorities(any_tree):
    sampler = PrioritizedSampler(4, alpha=1.0, beta=0.5, eps=0.0)
    sampler.update_priority(torch.arange(4), torch.tensor([1.0, 4.0, 9.0, 16.0]))
    sampler.alpha = 0.5
    assert sampler._sum_tree.values.tolist() == [1, 2, 3, 4]
    assert total(sampler._sum_tree) == 10.0


def test_update_priority_rejects_negative_errors(any_tree):
    sampler = PrioritizedSampler(4, alpha=0.6, beta=0.5)
    with raises_setting("td_error"):
        sampler.update_priority(torch.arange(3), torch.tensor([3.0, -2.0, 1.0]))
    assert sampler._sum_tree.values.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("name", "value"), [("alpha", -0.1), ("beta", 4), ("eps", -1)])
def test_sampler_rejects_out_of_range_arguments(name, value):
    with raises_setting(name):
        PrioritizedSampler(**{"max_capacity": 4, "alpha": 1.0, "beta": 1.0, name: value})


# ---------------------------------------------------------------------- in TorchRL and in the loop
def test_sampler_is_torchrl_prioritized_sampler():
    assert isinstance(PrioritizedSampler(4, alpha=0.6, beta=0.4), TorchRLPrioritizedSampler)


def test_sampler_dumps_and_loads(tmp_path):
    one, other = (PrioritizedSampler(50, alpha=0.6, beta=0.4) for _ in range(2))
    one.update_priority(torch.arange(30), torch.rand(30))
    one.dumps(tmp_path)
    other.loads(tmp_path)
    assert torch.equal(one._sum_tree.values, other._sum_tree.values)
    assert torch.equal(one.default_priority, other.default_priority)


def test_load_state_dict_restores_exponents():
    saved, loaded = (PrioritizedSampler(4, *given) for given in ((0.7, 0.9, 0.1), (0.6, 0.4, 0.2)))
    loaded.load_state_dict(saved.state_dict())
    assert (loaded.alpha, loaded.beta, loaded._eps) == (0.7, 0.9, 0.1)


def test_load_state_dict_rejects_priorities_beyond_capacity(any_tree):
    large, small = (PrioritizedSampler(size, alpha=0.7, beta=0.5) for size in (12, 10))
    large.update_priority(torch.arange(12), torch.ones(12))
    with raises_setting("max_capacity"):
        small.load_state_dict(large.state_dict())


def test_state_size_scales_with_written_priorities():
    sampler = PrioritizedSampler(1_000_000, alpha=0.6, beta=0.4)
    sampler.update_priority(torch.arange(30), torch.rand(30))
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    assert len(file.getvalue()) < 10_000


def test_trainer_rejects_loss_without_priority_key():
    plan = off_policy_plan()
    parts = sac_parts(plan)
    sampler = PrioritizedSampler(100, alpha=1.0, beta=0.5)
    parts["buffer"] = make_replay_buffer(100, plan.minibatch_size, sampler=sampler)
    parts["buffer"].buffer.priority_key = "surprise"
    with pytest.raises((SettingError, HookError), match="reads 'surprise', but the loss does not"):
        Trainer(plan, **parts).run()


@pytest.mark.gpu
def test_priority_tree_is_on_gpu_with_storage():
    sampler = PrioritizedSampler(100, alpha=1.0, beta=0.5, eps=0.0)
    replay = make_replay_buffer(100, 4, sampler=sampler, device="cuda")
    replay.buffer.extend(rows(0, 10).to("cuda"))
    replay.buffer.update_priority(torch.arange(10, device="cuda"), torch.eye(10, device="cuda")[3])
    assert sampler.device.type == "cuda"
    assert replay.buffer.sample()["row"].tolist() == [3] * 4
