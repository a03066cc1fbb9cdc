"""Configuration of the documentation site, which ``make docs`` builds with Sphinx."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import TextElement, reference
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.intersphinx import missing_reference
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import inspect

import kit
import kit.config
from kit.lazy import imports_of

DOCS = Path(__file__).parent

project = "kit"
version = release = kit.__version__
html_title = f"kit {release}"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
highlight_language = "text"
myst_heading_anchors = 4
nb_execution_mode = "off"  # they have outputs, and tests/test_notebooks.py runs them

autodoc_preserve_defaults = True
autodoc_type_aliases = {name: f"kit.config.{name}" for name in kit.config.__all__}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

# The inventories are text files with the names that these pages mention; a build needs no network.
intersphinx_mapping = {
    name: (address, f"inventories/{name}.inv")
    for name, address in {
        "gymnasium": "https://gymnasium.farama.org",
        "numpy": "https://numpy.org/doc/stable/reference",
        "python": "https://docs.python.org/3",
        "stable-baselines3": "https://stable-baselines3.readthedocs.io/en/master",
        "tensordict": "https://docs.pytorch.org/tensordict/stable",
        "torch": "https://docs.pytorch.org/docs/stable",
        "torchrl": "https://docs.pytorch.org/rl/stable",
    }.items()
}


# ---------------------------------------------------------------------- reference
COMMENTS: dict[str, list[str]] = {}
"""Comments of attributes and constants that napoleon is working on."""


def public_names() -> dict[str, list[str]]:
    """Return the public names by the package that documents them.

    A name that both ``kit`` and one of its packages export is documented by the package.
    """
    packages = [f"kit.{found.name}" for found in pkgutil.iter_modules(kit.__path__) if found.ispkg]
    names = {name: getattr(importlib.import_module(name), "__all__", []) for name in packages}
    elsewhere = {name for exported in names.values() for name in exported}
    own = [name for name in kit.__all__ if name not in elsewhere]
    return {"kit": own} | {package: exported for package, exported in names.items() if exported}


def reference_page(package: str, names: list[str]) -> str:
    """Return the page of a package: its docstring, and an entry for each of its names."""
    lines = [package, "=" * len(package), "", f".. automodule:: {package}", ""]
    for name in names:
        value = getattr(importlib.import_module(package), name)
        if inspect.isclass(value):
            lines += [f".. autoclass:: {package}.{name}", "   :members:", "   :show-inheritance:"]
        elif inspect.isroutine(value):
            lines += [f".. autofunction:: {package}.{name}"]
        else:
            lines += [f".. autodata:: {package}.{name}"]
        lines += [""]
    if package == "kit":
        lines += ["``kit`` also exports these names of its packages:", ""]
        imports = imports_of("kit")
        also = [name for name in kit.__all__ if name not in names]
        lines += [f"- :obj:`~{imports[name]}.{name}`" for name in also]
    return "\n".join(lines)


def class_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, result: str
) -> tuple[str, None] | None:
    """Show the arguments of ``__init__`` where ``__new__`` or a metaclass passes all arguments on.

    The arguments of a dataclass are its fields, which are listed below it.
    """
    if what != "class" or not (signature or "").startswith("(*args"):
        return None
    if dataclasses.is_dataclass(value):
        return "", None
    arguments = inspect.signature(value.__init__, bound_method=True)
    return inspect.stringify_signature(
        arguments, show_return_annotation=False, unqualified_typehints=True
    ), None


def write_reference(app: Sphinx) -> None:
    """Write one page for each package with public names."""
    (DOCS / "api").mkdir(exist_ok=True)
    for page in (DOCS / "api").glob("*.rst"):
        if page.stem not in public_names():
            page.unlink()
    for package, names in public_names().items():
        page, text = DOCS / "api" / f"{package}.rst", reference_page(package, names)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def keep_comment(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Record the comment of an attribute or constant before napoleon takes "name:" for a type."""
    package, _, constant = name.rpartition(".")
    module: str | None = package
    while what == "data" and module is not None:
        comments = ModuleAnalyzer.for_module(module).find_attr_docs()
        if comment := comments.get(("", constant)):
            lines[:] = comment
            break
        module = imports_of(module).get(constant)
    if what in ("attribute", "data", "property"):
        COMMENTS[name] = lines.copy()


def restore_comment(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Undo what napoleon made of the comment of an attribute or constant."""
    lines[:] = COMMENTS.pop(name, lines)


def link_shortest_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: TextElement
) -> reference | None:
    """Link ``torch.nn.Module`` where a signature names ``torch.nn.modules.module.Module``."""
    *path, name = node.get("reftarget", "").split(".")
    modules = [sys.modules.get(".".join(path[:length])) for length in range(1, len(path) + 1)]
    found = [module for module in modules if hasattr(module, name)]
    if not found or getattr(found[0], name) is not getattr(found[-1], name):
        return None
    node["reftarget"] = f"{found[0].__name__}.{name}"
    return missing_reference(app, env, node, content)


# ---------------------------------------------------------------------- pages
def adapt_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adapt a page that GitHub shows too.

    In ``index``, drop entries of toctrees that match no page. In all pages, turn links to Markdown
    outside of ``docs/`` into downloads.
    """
    lines = source[0].splitlines()
    if docname == "index":
        entry = re.compile(r"[\w-]+(/[\w*-]+|\*)")
        lines = [one for one in lines if not entry.fullmatch(one) or any(DOCS.glob(f"{one}.*"))]
    source[0] = re.sub(r"\]\(((\.\./)+(?:benchmarks|recipes)/)", r"](path:\1", "\n".join(lines))


def setup(app: Sphinx) -> None:
    """Connect the functions above to the build."""
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-signature", class_signature)
    app.connect("autodoc-process-docstring", keep_comment, priority=400)
    app.connect("autodoc-process-docstring", restore_comment, priority=600)
    app.connect("missing-reference", link_shortest_name)
    app.connect("source-read", adapt_page)
