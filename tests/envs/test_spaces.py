"""Spaces as arrays and as specs, and actions on their way to the environment."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, Unbounded

from kit.envs.spaces import ActionConverter, leaves, to_composite, to_spec
from tests.errors import raises_setting

NESTED = Dict({"camera": Box(0, 255, (2, 2), np.uint8), "arm": Dict({"joints": Box(-1, 1, (3,))})})


def test_leaves_returns_one_leaf_for_plain_space():
    (leaf,) = leaves(Box(-1, 1, (3,), np.float64), "observation", "observation_space")
    assert (leaf.key, leaf.path, leaf.shape) == ("observation", (), (3,))
    assert leaf.dtype == np.float32


def test_leaves_names_entries_of_nested_dict():
    found = leaves(NESTED, "observation", "observation_space")
    assert {leaf.key for leaf in found} == {"camera", ("arm", "joints")}
    assert {leaf.key: leaf.dtype for leaf in found}["camera"] == np.uint8
    assert {leaf.key for leaf in leaves(NESTED, "action", "action_space")} == {
        ("action", "camera"),
        ("action", "arm", "joints"),
    }


@pytest.mark.parametrize("space", [Text(3), Dict({"a": Text(3)}), gym.spaces.Tuple([Discrete(2)])])
def test_leaves_rejects_unsupported_spaces(space):
    with raises_setting("observation_space"):
        leaves(space, "observation", "observation_space")


@pytest.mark.parametrize(
    ("space", "kind", "shape"),
    [
        (Discrete(4), Categorical, (2,)),
        (Discrete(4, start=3), Categorical, (2,)),
        (MultiDiscrete([2, 3]), MultiCategorical, (2, 2)),
        (MultiDiscrete([[2, 3], [4, 5]]), MultiCategorical, (2, 2, 2)),
        (MultiBinary(3), Binary, (2, 3)),
        (Box(-1, 1, (3,)), Bounded, (2, 3)),
        (Box(-np.inf, 1, (3,)), Unbounded, (2, 3)),
        (Box(0, 255, (2, 2), np.uint8), Bounded, (2, 2, 2)),
    ],
)
def test_to_spec_adds_leading_env_dimension(space, kind, shape):
    (leaf,) = leaves(space, "action", "action_space")
    spec = to_spec(leaf, 2, None)
    assert isinstance(spec, kind)
    assert tuple(spec.shape) == shape
    assert spec.is_in(spec.rand())
    assert to_composite([leaf], 2, None)["action"] == spec


def _convert(space, values):
    found = leaves(space, "action", "action_space")
    return ActionConverter(space, found, 2)({found[0].key: np.asarray(values)})


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5))
def test_converter_clips_box_actions_to_bounds(values):
    space = Box(np.float32(-2), np.float32(0.5), (len(values),), np.float32)
    given = np.array([values, values], np.float32)
    converted = _convert(space, given)
    assert converted.dtype == np.float32
    assert np.array_equal(converted, np.clip(given, -2, np.float32(0.5)))
    assert space.contains(converted[0])


def test_converter_keeps_unbounded_and_integer_box_actions():
    values = np.array([[1e9, -1e9]] * 2, np.float32)
    assert np.array_equal(_convert(Box(-np.inf, np.inf, (2,)), values), values)
    assert _convert(Box(0, 9, (1,), np.int64), [[3]]).tolist() == [[3]]


def test_converter_casts_actions_to_space_dtype():
    assert _convert(Box(-1, 1, (1,), np.float64), np.ones((2, 1), np.float32)).dtype == np.float64
    assert _convert(Box(-1, 1, (1,), np.float32), np.ones((2, 1), np.int64)).dtype == np.float32
    for space in (
        MultiDiscrete([2, 3], dtype=np.int32),
        MultiDiscrete([2, 3], dtype=np.uint8, start=[1, 1]),
        MultiBinary(2),
        Box(0, 3, (2,), np.uint8),
    ):
        for values in (np.array([[1, 1], [0, 1]]), np.array([[1.0, 1.0], [0.0, 1.0]], np.float32)):
            assert all(space.contains(row) for row in _convert(space, values))


@pytest.mark.parametrize("space", [Discrete(2), Discrete(2, start=3)])
@pytest.mark.parametrize("values", [[1, 0], [True, False], [1.0, 0.0], np.int32([1, 0])])
def test_converter_returns_discrete_actions_as_python_ints(space, values):
    converter = ActionConverter(space, leaves(space, "action", ""), 2)
    rows = converter.rows({"action": np.asarray(values)})
    assert [(type(row), row - int(space.start)) for row in rows] == [(int, 1), (int, 0)]


@pytest.mark.parametrize(
    "space", [Discrete(2), Discrete(3, start=2), MultiBinary(2), MultiDiscrete([2, 2]),
              Box(0, 3, (2,), np.int64)],
)  # fmt: skip
def test_converter_rejects_fractional_integer_actions(space):
    converter = ActionConverter(space, leaves(space, "action", ""), 2)
    fractions = np.full((2, *space.shape), 0.75, np.float32)
    with raises_setting("action"):
        converter.rows({"action": fractions})


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (Discrete(2), [1, 2]),
        (Discrete(2), [-1, 0]),
        (Discrete(2), [1.0, 2.0]),
        (Discrete(3, start=2), [2, 3]),
        (MultiBinary(2), [[0, 1], [0, 2]]),
        (MultiDiscrete([5, 2]), [[4, 1], [1, 3]]),
        (Box(-1, 3, (2,), np.int64), [[0, -1], [-2, 0]]),
    ],
)
def test_converter_rejects_out_of_range_integer_actions(space, values):
    converter = ActionConverter(space, leaves(space, "action", ""), 2)
    with raises_setting("action"):
        converter.rows({"action": np.asarray(values)})


def test_converter_returns_valid_gymnasium_actions():
    converter = ActionConverter(Discrete(2), leaves(Discrete(2), "action", ""), 2)
    assert converter.rows({"action": np.array([0, 1])}) == [0, 1]
    space = Dict({"a": Discrete(2, start=1), "b": Dict({"c": Box(-1, 1, (2,))})})
    converter = ActionConverter(space, leaves(space, "action", ""), 2)
    rows = converter.rows(
        {("action", "a"): np.array([0, 1]), ("action", "b", "c"): np.full((2, 2), 9, np.float32)}
    )
    assert all(space.contains(row) for row in rows)
    assert [row["a"] for row in rows] == [1, 2]


@pytest.mark.parametrize("values", [np.zeros((2, 1)), np.zeros((2, 2)), np.zeros(2)])
def test_converter_rejects_actions_of_wrong_shape(values):
    with raises_setting("action"):
        _convert(Box(-1, 1, (3,)), values)
