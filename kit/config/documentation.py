"""The documentation of dataclass fields: the strings that stand under them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache


@lru_cache(maxsize=256)
def field_docs(cls: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, its bases' fields included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not object:
            docs |= _own_docs(base)
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:]):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
