"""Export the policy of a saved run to a PyTorch or ONNX file that does not need kit.

Run it::

    kit export latest policy.pt2           # for torch.export.load
    kit export latest policy.onnx --best   # needs the extra "onnx"
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from kit.cli.errors import errors_in_one_line
from kit.cli.evaluate import chosen_run, parser_for
from kit.envs.spaces import Key, Leaf, path_of
from kit.hooks import Evaluator
from kit.logging.files import make_folder, write_whole
from kit.runs.saved_policy import SavedPolicy, SavedRun
from kit.steps import SettingError

FORMATS = (".pt2", ".onnx")
_LONGEST = 1_000
"""Maximum number of steps on which the exported policy is compared with the original."""
_ROUNDING = 1e-4
"""Tolerance for continuous actions: absolute for values up to 1, relative for larger values."""

_ADVICE = "Use SavedRun.policy() instead"


class ExportedPolicy(nn.Module):
    """Deterministic policy that maps raw observations to environment actions.

    Observations are normalised as in training. Continuous actions are clipped to their bounds, and
    discrete actions are shifted by the ``start`` of their space. Observations and actions have a
    leading batch dimension of any size.

    Args:
        evaluator: evaluator for the policy.

    Raises:
        SettingError: if the policy reads more than the observation, such as a hidden state.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__()
        env, policy = evaluator.env, evaluator.policy
        self.inputs, self.outputs = env.observation_leaves, env.action_leaves
        known = {path_of(leaf.key) for leaf in self.inputs}
        known.add(("params",))  # a network with a CompositeDistribution writes this entry itself
        read = [path_of(key) for key in getattr(policy, "in_keys", ())]
        more = ["/".join(path) for path in read if path not in known]
        more += ["the particle index"] if evaluator.particles > 1 else []
        if more or not isinstance(policy, nn.Module):
            reason = f"It reads {', '.join(more)}, not only the observation"
            reason = reason if more else "The policy is not a module"
            raise SettingError("policy", type(policy).__name__, reason, _ADVICE)
        self.policy = policy.eval()
        self._moments = {} if env.normalizer is None else dict(env.normalizer.observation)
        self._normalizer = env.normalizer

    def forward(self, *observation: Tensor) -> tuple[Tensor, ...]:
        """Select actions. Each entry of a ``Dict`` space is a separate argument or output."""
        seen: dict[Key, Tensor] = {}
        for leaf, values in zip(self.inputs, observation, strict=True):
            moments = self._moments.get(leaf.key)
            values = values.to(_type(leaf.dtype))  # MuJoCo's observations are float64
            if leaf.start is not None:
                values = values - torch.as_tensor(leaf.start)
            seen[leaf.key] = values if moments is None else self._normalized(moments, values)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            chosen = self.policy(TensorDict(seen, [observation[0].shape[0]]))
        return tuple(_env_action(leaf, chosen.get(leaf.key)) for leaf in self.outputs)

    def _normalized(self, moments: Any, values: Tensor) -> Tensor:
        assert self._normalizer is not None
        statistics = self._normalizer.statistics._replace(observation=moments)
        return self._normalizer.apply(statistics, values)  # type: ignore[no-any-return]


def _env_action(leaf: Leaf, action: Tensor) -> Tensor:
    """Convert a policy action to an element of the action space."""
    space, action = leaf.space, action.detach()
    if leaf.start is not None:
        action = action + torch.as_tensor(leaf.start)
    if isinstance(space, gym.spaces.Box) and action.is_floating_point():
        action = action.clamp(torch.as_tensor(space.low), torch.as_tensor(space.high))
    return action if space is None else action.to(_type(space.dtype))


def _type(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


# ---------------------------------------------------------------------- export
def export(run: SavedRun, file: Path, seed: int = 0) -> str:
    """Export a run's policy to a file, after checking that its actions are unchanged.

    Args:
        run: run that contains the policy.
        file: file to write: ``.pt2`` (``torch.export``) or ``.onnx``.
        seed: seed of the episode on which the two policies are compared.

    Returns:
        Text that describes the inputs and outputs.

    Raises:
        SettingError: if the policy cannot be exported, or a package is missing.
        WriteError: if the file cannot be written.
    """
    if file.suffix not in FORMATS:
        raise SettingError("file", str(file), "This file format is not supported", FORMATS)
    policy = ExportedPolicy(run.evaluator(1, 0, vectorization="sync"))
    seen, chosen = _episode(run.policy(), policy.inputs, policy.outputs, seed)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's exporters warn about their own code
        content, found = _exported(policy, file.suffix, seen)
    _compare(run, policy.outputs, found, chosen)
    make_folder(file.parent)
    write_whole(file, content)
    inputs, outputs = (map(_shown, leaves) for leaves in (policy.inputs, policy.outputs))
    return (
        f"{', '.join(inputs)} -> {', '.join(outputs)}, deterministic; "
        f"same actions as the run in {len(chosen[0]):,} steps of an episode"
    )


def _exported(
    policy: ExportedPolicy, kind: str, seen: Sequence[NDArray[Any]]
) -> tuple[bytes, list[NDArray[Any]]]:
    """Return the file content, and the actions that the exported policy selects."""
    # Two rows, because torch.export would treat a single row as a fixed batch size.
    examples = tuple(torch.from_numpy(values[[0, -1]]) for values in seen)
    rows = tuple({0: torch.export.Dim("n")} for _ in examples)
    try:
        program = torch.export.export(policy, examples, dynamic_shapes=(rows,))
        file = io.BytesIO()
        if kind == ".pt2":
            torch.export.save(program, file)
            file.seek(0)
            loaded = torch.export.load(file).module()
            found = loaded(*map(torch.from_numpy, seen))
            return file.getvalue(), [action.numpy() for action in found]
        return _onnx(program, policy, seen)
    except Exception as error:  # PyTorch's exporters raise many types of errors
        cause = " ".join(str(error).strip().split("\n")[0].split())
        reason = f"PyTorch cannot export it: {type(error).__name__}: {cause}"
        raise SettingError("policy", type(policy.policy).__name__, reason, _ADVICE) from error


def _onnx(
    program: Any, policy: ExportedPolicy, seen: Sequence[NDArray[Any]]
) -> tuple[bytes, list[NDArray[Any]]]:
    from onnx.reference import ReferenceEvaluator

    sides = policy.inputs, policy.outputs
    inputs, outputs = ([_name(leaf) for leaf in side] for side in sides)
    named: dict[str, Any] = {"input_names": inputs, "output_names": outputs}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # hides warnings about packages
    model = torch.onnx.export(program, dynamo=True, verbose=False, **named)
    assert model is not None
    proto = model.model_proto
    found = ReferenceEvaluator(proto).run(None, dict(zip(inputs, seen)))
    return proto.SerializeToString(), [np.asarray(action) for action in found]


# ---------------------------------------------------------------------- comparison
def _episode(
    policy: SavedPolicy, inputs: Sequence[Leaf], outputs: Sequence[Leaf], seed: int
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Play an episode. Return an array ``[steps, ...]`` per observation entry and action entry."""
    env = policy.make_env()
    observation, info = env.reset(seed=seed)
    policy.reset()
    seen: list[Any] = []
    chosen: list[Any] = []
    done = False
    while not done and len(seen) < _LONGEST:
        action = policy(observation, info)
        seen.append([_entry(observation, leaf).astype(_env_type(leaf)) for leaf in inputs])
        chosen.append([_entry(action, leaf) for leaf in outputs])
        observation, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated
    env.close()
    return [np.stack(rows) for rows in zip(*seen)], [np.stack(rows) for rows in zip(*chosen)]


def _entry(tree: Any, leaf: Leaf) -> NDArray[Any]:
    for name in leaf.path:
        tree = tree[name]
    return np.array(tree)


def _compare(
    run: SavedRun,
    outputs: Sequence[Leaf],
    found: Sequence[NDArray[Any]],
    chosen: Sequence[NDArray[Any]],
) -> None:
    """Raise SettingError if the exported policy and the original select different actions."""
    for leaf, ours, theirs in zip(outputs, found, chosen, strict=True):
        bound = _ROUNDING * np.maximum(np.abs(theirs), 1.0) if ours.dtype.kind == "f" else 0
        differ = np.abs(ours.astype(np.float64) - theirs) > bound
        if differ.any():
            steps = int(differ.reshape(len(differ), -1).any(1).sum())
            reason = (
                f"The exported policy differs in {_name(leaf)} in {steps} of {len(theirs)} steps"
            )
            raise SettingError("run", str(run.folder), reason, _ADVICE)


def _env_type(leaf: Leaf) -> Any:
    """Return the dtype in the environment; the policy may use float32 instead."""
    return leaf.dtype if leaf.space is None else leaf.space.dtype


def _name(leaf: Leaf) -> str:
    return "/".join(path_of(leaf.key))


def _shown(leaf: Leaf) -> str:
    return f"{_name(leaf)} [{', '.join(map(str, ('n', *leaf.shape)))}] {_env_type(leaf)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``kit export``."""
    parser = parser_for("kit export", __doc__)
    parser.add_argument("file", type=Path, help="file to write: .pt2 (PyTorch) or .onnx")
    given = parser.parse_args(argv)
    with errors_in_one_line():
        run = chosen_run(given, device="cpu")
        print(f"{given.file}: {export(run, given.file)}")
        run.close()
