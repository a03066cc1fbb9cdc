"""Imports run one way, and importing the kit costs what importing TorchRL costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kit

ROOT = Path(kit.__file__).parents[1]
FLOORS: list[set[str]] = [
    {"recipes"},
    {"__init__"},
    {"__main__", "evaluate", "experiment", "testing", "tune"},
    {"cli"},
    {"runs"},
    {"trainer", "hooks", "dialects"},
    {"update", "collectors", "buffers"},
    {"advantages", "losses", "modules", "envs", "logging"},
    {"fast", "config", "distributed"},
    {"steps"},
    {"lazy"},
]
"""Rooms and single modules, from the top: a module imports from its own floor and from below."""


def modules() -> dict[str, Path]:
    """Every module of the kit and of the recipes by its full name."""
    files = [*ROOT.glob("kit/**/*.py"), *ROOT.glob("recipes/**/*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Yield what of ours is imported anywhere below ``tree``, for annotations alone too."""
    for node in ast.iter_child_nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            constants = {"__version__", "RECIPES_ROOT"}  # defined in kit/__init__.py itself
            if not constants.issuperset(alias.name for alias in node.names):
                names.append(str(node.module))
        for name in names:
            for ours in (name, f"{name}.__init__"):
                if ours in known:
                    yield ours
        yield from imported(node, known)


def imports() -> dict[str, set[str]]:
    """What each module imports of ours, functions included."""
    files = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    return {name: set(imported(tree, set(files))) - {name} for name, tree in trees.items()}


def floor(module: str) -> int:
    """The floor of a module, from the top."""
    package, *rest = module.split(".")
    room = "recipes" if package == "recipes" else rest[0]
    (number,) = [n for n, rooms in enumerate(FLOORS) if room in rooms]
    return number


# ---------------------------------------------------------------------- rooms
def test_package_root_has_at_most_six_modules():
    assert len(list((ROOT / "kit").glob("*.py"))) <= 6


# ---------------------------------------------------------------------- direction
def test_every_module_has_assigned_layer():
    assert all(floor(name) >= 0 for name in modules())
    there = {name.split(".")[1] for name in modules() if name.startswith("kit.")}
    assert there | {"recipes"} == set().union(*FLOORS)


def test_imports_point_to_lower_layers():
    upwards = {
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if floor(other) < floor(name)
    }
    assert upwards == set()


def test_steps_package_imports_only_itself():
    outside = {
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if name.startswith("kit.steps.") and not other.startswith("kit.steps.")
    }
    assert outside == set()


DIALECTS = "kit.dialects."
USERS_OF_DIALECTS = ("kit.experiment", "kit.runs.", "kit.cli.", "kit.testing.", "recipes.")


def test_dialects_import_only_steps_and_core_imports_no_dialect():
    for name, others in imports().items():
        if name.startswith(DIALECTS):
            below = (DIALECTS, "kit.steps.", "kit.lazy")
            assert not {o for o in others if not o.startswith(below)}, name
        elif not name.startswith(USERS_OF_DIALECTS):
            assert not {o for o in others if o.startswith(DIALECTS)}, name


def test_only_registry_names_dialect_modules():
    """An import of a module by its name in a text is in no syntax tree."""
    named = [
        name
        for name, path in modules().items()
        if name.startswith("kit.") and not name.startswith((DIALECTS, "kit.cli.", "kit.testing."))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and str(node.value).startswith("kit.dialects")
    ]
    assert set(named) == {"kit.steps.registry"}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    assert set(order) >= set(graph)
    return []


def packages_of(module: str) -> set[str]:
    """The packages that a module is in, by the name of their ``__init__``."""
    parts = module.split(".")
    return {".".join([*parts[:n], "__init__"]) for n in range(1, len(parts))}


def test_imports_have_no_cycle():
    # A package and its own modules import each other; Python allows for that.
    graph = {name: others - packages_of(name) for name, others in imports().items()}
    assert circle(graph) == []


def test_cycle_check_finds_cycle():
    graph = {"hooks": {"trainer"}, "trainer": {"journal"}, "journal": {"hooks"}, "steps": set()}
    assert set(circle(graph)) == {"hooks", "trainer", "journal"}


def test_other_modules_do_not_import_recipes_or_testing():
    for name, others in imports().items():
        for package in ("recipes", "kit.testing"):
            if not name.startswith(package):
                assert not [other for other in others if other.startswith(package)], name


def test_imported_finds_every_kind_of_import():
    source = """
import kit.evaluate
from typing import TYPE_CHECKING
from kit import trainer
from kit.steps import StepPlan
if TYPE_CHECKING:
    from kit.logging.metrics_recorder import Journal
def function():
    from kit.buffers import ReplayMinibatches
"""
    found = set(imported(ast.parse(source), set(modules())))
    expected = {
        "kit.evaluate",
        "kit.trainer.__init__",
        "kit.__init__",
        "kit.steps.__init__",
        "kit.logging.metrics_recorder",
        "kit.buffers.__init__",
    }
    assert found == expected
    assert (
        floor("kit.steps.plan") > floor("kit.update") > floor("kit.hooks.base") > floor("recipes")
    )


# ---------------------------------------------------------------------- what importing costs
TORCHRL = (
    "import torchrl.checkpoint, torchrl.collectors, torchrl.objectives, torchrl.record, "
    "torchrl.trainers"
)
BESIDES = "gymnasium, rich, yaml"


def loaded(code: str) -> set[str]:
    """Every module that is loaded after ``code`` has run in a new process."""
    show = f"{code}\nimport sys; print(*sys.modules)"
    command = [sys.executable, "-c", show]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ran.stdout.split())


def test_importing_recipes_loads_only_known_packages():
    # What these load in turn depends on which extras are installed, so they are asked.
    more = loaded("import recipes.ppo, recipes.sac") - loaded(f"{TORCHRL}, {BESIDES}")
    packages = {name.partition(".")[0] for name in more} - set(sys.stdlib_module_names)
    known = ("torch", "torchrl", "tensordict", "numpy", *BESIDES.split(", "))
    assert {p for p in packages if not p.startswith("_")} - set(known) == {"kit", "recipes"}
    compilers = ("torch._dynamo", "torch._inductor", "torch.testing", "torch.onnx")
    assert not {name for name in more if name.startswith(compilers)}


NO_TORCH = [
    "kit", "kit.steps", "kit.envs", "kit.config", "kit.testing", "kit.logging", "kit.cli.steps",
    "kit.cli.compare_plot",
]  # fmt: skip


@pytest.mark.parametrize("module", NO_TORCH)
def test_importing_light_module_does_not_load_torch(module):
    assert not {"torch", "torchrl", "tensordict", "gymnasium"} & loaded(f"import {module}")


def test_importing_kit_loads_no_package():
    more = loaded("import kit") - loaded("")
    ours = {name for name in more if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"kit", "kit.lazy"}
