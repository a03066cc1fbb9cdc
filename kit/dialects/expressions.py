"""Values of Python scripts of other libraries, such as ``30 * env.max_steps``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from kit.steps.errors import SettingError

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Pow: lambda base, exponent: float(base) ** exponent,  # floats overflow instead of growing
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


class Expressions:
    """Evaluates expressions: literals, arithmetic, ``dict(...)``, names and conditions.

    Args:
        names: values of dotted names such as ``env.max_steps``. Other names evaluate to their last
            part: ``lr_scheduler.ExponentialLR`` to ``"ExponentialLR"``.

    Attributes:
        conditional: fields whose expression has a condition. Its first branch is used.
    """

    def __init__(self, names: Mapping[str, Callable[[str], Any]]) -> None:
        self.names = names
        self.conditional: dict[str, str] = {}

    def value_of(self, field: str, text: str) -> Any:
        """Return the value of an expression.

        Raises:
            SettingError: if the expression contains anything else, or its arithmetic fails.
        """
        try:
            return self._value(field, text, ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ArithmeticError, TypeError, ValueError) as error:
            if isinstance(error, SettingError):
                raise
            reason = "This expression cannot be evaluated without running code"
            raise SettingError(field, text, reason, "Give its value") from None

    def _value(self, field: str, text: str, node: ast.AST) -> Any:
        def value(inner: ast.AST) -> Any:
            return self._value(field, text, inner)

        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [value(entry) for entry in node.elts]
            case ast.Dict() if None not in node.keys:
                return {value(n): value(one) for n, one in zip(node.keys, node.values) if n}
            case ast.BinOp():
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.operand))
            case ast.IfExp():
                self.conditional[field] = ast.unparse(node.test)
                return value(node.body)
            case ast.Call(ast.Name("dict"), [], entries) if all(entry.arg for entry in entries):
                return {entry.arg: value(entry.value) for entry in entries}
            case ast.Call(func=ast.Name(id="int" | "float" as kind), args=[number], keywords=[]):
                return {"int": int, "float": float}[kind](value(number))
            case ast.Call(args=[], keywords=[]):  # RunningStandardizer()
                return value(node.func)
            case ast.Attribute() | ast.Name():
                name = ast.unparse(node)
                return self.names[name](text) if name in self.names else name.rpartition(".")[2]
        raise ValueError
