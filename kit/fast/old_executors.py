"""Executes a list of tensor operations without Python in between.

The list becomes a graph for PyTorch's C++ interpreter, unoptimised, so that every kernel that was
recorded is called as it was recorded. Where this interpreter is missing, Python calls them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kit.fast.old_trace import Operation

Run = Callable[..., tuple[Tensor, ...]]


def flat_function(
    operations: list[Operation],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    compile: bool = False,
) -> tuple[Run, str]:
    """Return a function that calls recorded operations on new tensors, and what executes it.

    Args:
        operations: what to execute, in order.
        inputs: the tensors that stand for the arguments of a call.
        outputs: the tensors to return.
        compile: whether ``torch.compile`` compiles the list.
    """
    if compile:
        return torch.compile(_fx_module(operations, inputs, outputs)), "compiled"
    try:
        return _graph_run(operations, inputs, outputs), "graph"
    except (RuntimeError, TypeError, AttributeError, KeyError, NotImplementedError):
        # An argument that the graph has no constant for: rare, and Python can always do it.
        return _python_run(operations, inputs, outputs), "python"


def _graph_run(
    operations: list[Operation], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Run:
    builder = _GraphBuilder(inputs)
    for operation in operations:
        builder.add(operation)
    function = builder.finish(outputs)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        # Without this the interpreter would specialise and reorder after a few calls.
        optimize = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            return function(*tensors)  # type: ignore[no-any-return]
        finally:
            torch._C._set_graph_executor_optimize(optimize)

    return run


class _GraphBuilder:
    """Writes operations into a ``torch._C.Graph``."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.graph = torch._C.Graph()
        self.values: dict[int, Any] = {}
        for number, tensor in enumerate(inputs):
            self.values[id(tensor)] = self.graph.addInput(f"input_{number}")

    def add(self, operation: Operation) -> None:
        """Append one operation with all its arguments, defaults included."""
        schema = operation.function._schema
        arguments = []
        for number, argument in enumerate(schema.arguments):
            if number < len(operation.arguments):
                value = operation.arguments[number]
            elif argument.name in operation.keywords:
                value = operation.keywords[argument.name]
            else:
                value = argument.default_value if argument.has_default_value() else None
            arguments.append(self._argument(value, argument.type))
        node = self.graph.create(schema.name, arguments, len(schema.returns))
        self.graph.insertNode(node)
        results = operation.result if len(schema.returns) > 1 else (operation.result,)
        for output, returned, result in zip(node.outputs(), schema.returns, results):
            output.setType(returned.type)
            if isinstance(result, (list, tuple)):
                self._unpack(output, result)
            elif isinstance(result, Tensor):
                self.values[id(result)] = output

    def _unpack(self, output: Any, tensors: Sequence[Tensor]) -> None:
        """Split a list that an operation returns into its tensors."""
        node = self.graph.create("prim::ListUnpack", [output], len(tensors))
        self.graph.insertNode(node)
        for value, tensor in zip(node.outputs(), tensors):
            value.setType(torch._C.TensorType.get())
            self.values[id(tensor)] = value

    def _argument(self, value: Any, kind: Any) -> Any:
        if isinstance(value, Tensor):
            return self.values[id(value)]
        if isinstance(value, (list, tuple)):
            element = kind
            while not isinstance(element, torch._C.ListType):
                element = element.getElementType()
            if any(isinstance(item, Tensor) for item in value) or not value:
                items = [self._argument(item, element.getElementType()) for item in value]
                node = self.graph.create("prim::ListConstruct", items, 1)
                self.graph.insertNode(node)
                node.output().setType(element)
                return node.output()
            return self.graph.insertConstant(list(value))  # type: ignore[attr-defined]
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        if isinstance(value, int) and not isinstance(value, bool) and "float" in str(kind):
            value = float(value)
        return self.graph.insertConstant(value)  # type: ignore[attr-defined]

    def finish(self, outputs: Sequence[Tensor]) -> Run:
        """Return the graph as a function."""
        values = [self.values[id(tensor)] for tensor in outputs]
        node = self.graph.create("prim::TupleConstruct", values, 1)
        self.graph.insertNode(node)
        node.output().setType(torch._C.TupleType([value.type() for value in values]))
        self.graph.registerOutput(node.output())
        self.graph.lint()
        return torch._C._create_function_from_graph("flat_program", self.graph)  # type: ignore[no-any-return]


_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


def _fx_module(
    operations: list[Operation], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> torch.fx.GraphModule:
    """Return the operations as a graph that ``torch.compile`` takes whole."""
    graph = torch.fx.Graph()
    nodes: dict[int, Any] = {}
    for number, tensor in enumerate(inputs):
        nodes[id(tensor)] = graph.placeholder(f"input_{number}")

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            return nodes[id(value)]
        if isinstance(value, (list, tuple)):
            return [argument(item) for item in value]
        return value

    for operation in operations:
        node = graph.call_function(
            operation.function,
            tuple(argument(value) for value in operation.arguments),
            {name: argument(value) for name, value in operation.keywords.items()},
        )
        if isinstance(operation.result, (list, tuple)):
            for number, tensor in enumerate(operation.result):
                nodes[id(tensor)] = graph.call_function(operator.getitem, (node, number))
        elif isinstance(operation.result, Tensor):
            nodes[id(operation.result)] = node
    graph.output(tuple(nodes[id(tensor)] for tensor in outputs))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _python_run(
    operations: list[Operation], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Run:
    """Return a Python function that calls the operations one by one."""
    slots: dict[int, int] = {id(tensor): number for number, tensor in enumerate(inputs)}
    steps = []
    for operation in operations:
        arguments = _by_slot(operation.arguments, slots)
        keywords = {name: _by_slot(value, slots) for name, value in operation.keywords.items()}
        results = operation.result
        many = isinstance(results, (list, tuple))
        targets = []
        for tensor in results if many else [results]:
            targets.append(slots.setdefault(id(tensor), len(slots)))
        steps.append((operation.function, arguments, keywords, targets, many))
    returned = [slots[id(tensor)] for tensor in outputs]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        memory: list[Any] = [*tensors, *([None] * (len(slots) - len(tensors)))]
        for function, arguments, keywords, targets, many in steps:
            result = function(
                *_fetch(arguments, memory), **{k: _fetch(v, memory) for k, v in keywords.items()}
            )
            for target, value in zip(targets, result if many else [result]):
                memory[target] = value
        return tuple(memory[slot] for slot in returned)

    return run


class _Slot(int):
    """The number of a tensor in the memory of a run."""


def _by_slot(value: Any, slots: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        return _Slot(slots[id(value)])
    if isinstance(value, (list, tuple)):
        return [_by_slot(item, slots) for item in value]
    return value


def _fetch(value: Any, memory: list[Any]) -> Any:
    if isinstance(value, _Slot):
        return memory[value]
    if isinstance(value, list):
        return [_fetch(item, memory) for item in value]
    return value
