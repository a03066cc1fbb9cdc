"""A CUDA device that is simulated: tensors that say ``cuda:0``, whose values are on the CPU.

    python -m tests.simulated_cuda ppo sac

Runs recipes on it, eagerly, and prints as JSON for each how many gradient steps it made and where
values crossed between host and device. Tensors of both in one operation raise an error, as on a
GPU. Memory, streams, CUDA graphs and a GPU's random numbers are not simulated.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import sys
import traceback
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import nn
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.stored import NAMES, read_stored

aten = torch.ops.aten
CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")

CROSSINGS: collections.Counter[str] = collections.Counter()
"""How often values crossed, by kind and file."""

TAKES_BOTH = {aten.copy_.default, aten._to_copy.default, aten.lift_fresh.default}
PUTS = {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# The gradients of parts have zeros that C++ makes where it sees a CPU.
BACKWARD_TAKES_BOTH = {
    aten.cat.default, aten.stack.default, aten.scatter.src, aten.scatter_add.default,
}  # fmt: skip
HOST_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}


class Simulated(torch.Tensor):
    """A tensor of the simulated device; C++ sees the CPU, Python a GPU."""

    inner: torch.Tensor
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=CPU,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            with torch.no_grad():
                copied = Simulated(self.inner.clone())
            parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if parameter else copied
        return memo[id(self)]

    def to(self, *args, copy=False, **kwargs):
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            crosses("to host")
            return ToHost.apply(self, dtype or self.dtype)
        if dtype in (None, self.dtype) and layout is None and not copy:
            return self
        return aten._to_copy(self, dtype=dtype or self.dtype, memory_format=layout)

    def cpu(self):
        return self.to("cpu")

    def tolist(self):
        crosses("host read")
        return self.inner.tolist()

    def numpy(self, **kwargs):
        raise TypeError(f"can't convert cuda:0 device type tensor to numpy, in {place()}")

    __array__ = numpy

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()


class ToHost(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor, dtype):
        return tensor.inner.detach().clone().to(dtype)

    @staticmethod
    def backward(context, gradient):
        return Simulated(gradient), None


class Device(TorchDispatchMode):
    """Makes tensors of the simulated device where it is asked for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


def place() -> str:
    """The file of the kit or of TorchRL that is running."""
    for frame in reversed(traceback.extract_stack()):
        for package in ("torchrl", "kit", "recipes"):
            if f"/{package}/" in frame.filename:
                return f"{package}/{frame.filename.rpartition(f'/{package}/')[2]}"
    return "?"


def crosses(kind: str) -> None:
    CROSSINGS[f"{kind}: {place()}"] += 1


def refuses_numbers(function: Any, args: Any) -> bool:
    """Whether an operation on the device refuses a single number on the host, too.

    One that joins tensors does, and one that would change such a number in place.
    """
    if function in (aten.stack.default, aten.cat.default):
        return True
    name = str(function.overloadpacket)
    if not name.endswith("_") or name.endswith(("copy_", "fill_", "index_put_", "impl_")):
        return False
    changed = [one for one in tree_flatten(args[:1])[0] if isinstance(one, torch.Tensor)]
    return any(not isinstance(one, Simulated) for one in changed)


def takes_both(function: Any, args: Any) -> bool:
    """Whether an operation takes tensors of both host and device."""
    if function is aten.index.Tensor or function in PUTS:  # indices may be on the host
        values = [one for one in args[2:3] if one.dim() > 0]
        return all(isinstance(one, Simulated) for one in (args[0], *values))
    in_backward = torch._C._current_graph_task_id() != -1
    return function in TAKES_BOTH or (in_backward and function in BACKWARD_TAKES_BOTH)


def computed(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, on the device on which a GPU would."""
    found = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    ours = [one for one in found if isinstance(one, Simulated)]
    others = [one for one in found if not isinstance(one, Simulated)]
    if not refuses_numbers(function, args):
        others = [one for one in others if one.dim() > 0]
    if ours and others and not takes_both(function, args):
        raise RuntimeError(f"tensors on cuda:0 and the CPU in {function}, in {place()}")
    if ours and function in HOST_READS:
        crosses("host read")
    if ours and others and "index" in str(function):
        crosses("host index")
    on_device = isinstance(args[0], Simulated) if function is aten.copy_.default else bool(ours)
    if (device := kwargs.get("device")) is not None:
        on_device = torch.device(device).type == "cuda"
        kwargs = {**kwargs, "device": CPU}
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": False}
    if function in (aten._to_copy.default, aten.copy_.default):
        source = args[0] if function is aten._to_copy.default else args[1]
        if isinstance(source, Simulated) != on_device:
            crosses("to device" if on_device else "to host")
    given = {id(one.inner): one for one in ours}
    plain = tree_map(lambda one: one.inner if isinstance(one, Simulated) else one, (args, kwargs))
    result = function(*plain[0], **plain[1])

    def shown(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) in given:
            return given[id(one)]
        return Simulated(one) if on_device else one

    return tree_map(shown, result)


def install() -> None:
    """Make PyTorch say that there is a GPU."""
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_rng_state": torch.get_rng_state(), "get_rng_state_all": [],
        "mem_get_info": (2**34, 2**34), "is_bf16_supported": True,
    }  # fmt: skip
    silent = ("synchronize", "set_rng_state", "set_rng_state_all", "manual_seed_all")
    for name in (*answers, *silent):
        setattr(torch.cuda, name, functools.partial(_answer, answers.get(name)))
    nothing = functools.partial(_answer, None)
    torch.cuda.Event = lambda: SimpleNamespace(record=nothing, synchronize=nothing)
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _made_by(getattr(torch, name)))
    torch.Tensor.to = _moved(torch.Tensor.to)
    torch.Generator = Generator
    torch.nn.functional.dropout = _dropout
    torch.quantile = _quantile(torch.quantile)
    torch.inference_mode = lambda mode=True: torch.no_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    TensorDictParams._apply = _apply
    optimizers = importlib.import_module("torch.optim.optimizer")
    grouped = _foreach_utils._group_tensors_by_device_and_dtype
    optimizers._group_tensors_by_device_and_dtype = _grouped(grouped)
    Device().__enter__()


class _OnAnyDevice(type):
    host = torch.Generator

    def __call__(cls, device="cpu"):
        return cls.host()

    def __instancecheck__(cls, one):
        return isinstance(one, cls.host)


class Generator(metaclass=_OnAnyDevice):
    """Those of the host, for every device."""


def _answer(answer: Any, *_: Any) -> Any:
    return answer


def _made_by(make: Any) -> Any:
    """``torch.tensor``, which does not ask a mode where to make it."""

    def made(data, *args, device=None, **kwargs):
        if isinstance(data, Simulated):
            value = data if make.__name__ == "as_tensor" else data.detach().clone()
            value = value if device is None else value.to(device)
            return value if kwargs.get("dtype") is None else value.to(kwargs["dtype"])
        value = make(data, *args, **kwargs)
        on_device = device is not None and torch.device(device).type == "cuda"
        return Simulated(value) if on_device else value

    return made


def _moved(to: Any) -> Any:
    """``Tensor.to``, which asks CUDA itself for the number of a device without one."""

    def moved(self, *args, **kwargs):
        def numbered(one):
            return CUDA if one == "cuda" or one == torch.device("cuda") else one

        numbers = {name: numbered(value) for name, value in kwargs.items()}
        return to(self, *map(numbered, args), **numbers)

    return moved


def _dropout(given, p=0.5, training=True, inplace=False):
    """In operations that ask where to make the mask."""
    return given * (torch.rand_like(given) >= p) / (1 - p) if training and p else given


def _quantile(quantile: Any) -> Any:
    """In one operation: C++ makes what it needs where it sees a CPU."""

    def found(given, ends, *args, **kwargs):
        if not isinstance(given, Simulated):
            return quantile(given, ends, *args, **kwargs)
        if not isinstance(ends, Simulated):
            raise RuntimeError(f"tensors on cuda:0 and the CPU in quantile, in {place()}")
        return Simulated(quantile(given.inner, ends.inner, *args, **kwargs))

    return found


def _apply(self, function, recurse=True):
    """TensorDict's method, with buffers that are swapped: their data are of another type."""
    self._param_td._erase_cache()
    self._param_td = self._param_td.copy()
    buffers = dict(self._buffers)
    moved = nn.Module._apply(self, function, recurse=recurse)
    for name, buffer in buffers.items():
        if self._buffers[name] is not buffer:
            torch.utils.swap_tensors(buffer, self._buffers[name])
        self._buffers[name] = buffer
    if not moved._check_device(raise_exception=False):
        moved.auto_device_()
    return moved


def _grouped(group: Any) -> Any:
    """Groups of parameters by device, as optimisers see them."""

    def groups(lists, with_indices=False):
        found = {}
        for (device, kind), (members, places) in group(lists, with_indices).items():
            ours = any(isinstance(one, Simulated) for one in members[0])
            found[CUDA if ours else device, kind] = (members, places)
        return found

    return groups


def config_of(name: str) -> Any:
    """Settings of a short run of a recipe on the device; ``name:setting`` without that."""
    name, _, without = name.partition(":")
    settings = importlib.import_module(f"recipes.{name}").Config()
    settings.device, settings.progress, settings.runs = "cuda:0", False, None
    settings.compile = False
    settings.env.num_envs = 4 if name == "svpg" else 2
    settings.collector = "torchrl" if settings.collector == "async" else settings.collector
    steps = settings.steps
    steps.evaluation_every, steps.evaluation_episodes = None, 1
    whole_episodes = bool(getattr(steps, "min_episodes", None) or getattr(steps, "min_steps", None))
    if type(steps).__name__ == "OfflineSteps":
        settings.dataset, settings.env.id = NAMES[:1], "Pendulum-v1"
        steps.gradient_steps, steps.gradient_steps_per_iteration = 64, 8
        steps.minibatch_size = 4
    elif type(steps).__name__ == "OnPolicySteps":
        steps.total_policy_steps, steps.rounding = 96, "up"
        if not whole_episodes:
            steps.steps_per_env, steps.update_epochs = 16, 1
            if steps.minibatch_size is not None:
                steps.minibatch_size = 2 if steps.sequence_length else 8
    else:
        steps.total_policy_steps, steps.learning_starts = 64, 16
        steps.minibatch_size, steps.replay_ratio = 4, "1/2"
        if not whole_episodes:
            steps.steps_per_env = 1
        if steps.sequence_length:
            steps.sequence_length, steps.learning_starts = 8, 32
    for field, value in (("size", "nano"), ("hidden_sizes", [8]), ("buffer_size", 128)):
        if hasattr(settings, field):
            setattr(settings, field, value)
    if without:
        setattr(settings, without, False)
    return settings


def record_nothing() -> None:
    """Have the kit run eagerly: programs are not simulated."""
    from kit.fast import traced

    def nothing(*_):
        raise traced.TraceError("the device is simulated")

    traced.record = nothing


def main(names: list[str]) -> None:
    """Run recipes one after the other, and print what was seen."""
    from kit import experiment

    warnings.simplefilter("ignore")
    record_nothing()
    experiment.read_datasets = read_stored
    recipes = {name: name.partition(":")[0] for name in names}
    modules = {n: importlib.import_module(f"recipes.{recipe}") for n, recipe in recipes.items()}
    install()
    for name, module in modules.items():
        trainer = module.build(config_of(name))
        CROSSINGS.clear()
        ledger = trainer.run()
        print(json.dumps([name, ledger.gradient_steps, CROSSINGS]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
