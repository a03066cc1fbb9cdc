"""The code in the documentation runs as it stands."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kit.__main__ import main as kit
from kit.cli.launch import main
from kit.steps.settings import OnPolicySteps

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDERS = (DOCS, DOCS / "guides", DOCS / "coming-from")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]


def name_of(page: Path) -> str:
    """Return the name of a page in test IDs: its path below docs/, without the suffix."""
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def blocks(language: str) -> Iterator[tuple[Path, int, str]]:
    """Page, number of lines before it, and text of each block of code."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield page, text[: found.start(1)].count("\n"), found[1]


# ---------------------------------------------------------------------- Python
def marks(page: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a block: those of the README stay in the fast suite."""
    return (pytest.mark.guard,) if page == "README" else ()


PYTHON = [
    pytest.param(*block, id=f"{name_of(block[0])}:{block[1] + 1}", marks=marks(block[0].stem))
    for block in blocks("python")
]


@pytest.mark.parametrize(("page", "line", "code"), PYTHON)
def test_python_block_runs(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))  # restored after a page that sets it
    module = ModuleType("documented")  # in `sys.modules`, where dataclasses look types up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)


# ---------------------------------------------------------------------- shell
NOT_RUN = {
    "make": "takes minutes and installs packages; continuous integration runs lint and test",
    "git": "needs the network",
    "pip": "installs packages",
    "torchrun": "starts several processes; tests/distributed/test_rank_documents.py runs it",
}
NEEDS = {"HalfCheetah": ("mujoco",), "preset=mujoco": ("mujoco",), "tensorboard": ("tensorboard",),
         "video": ("moviepy", "pygame"), "envpool": ("envpool",),
         ".onnx": ("onnxscript",), "ale_py": ("ale_py", "cv2")}  # fmt: skip
"""What a command needs beyond the dependencies, by a part of its text."""

# What makes a command short: settings added to those it has, by the vocabulary it speaks.
SHORT = {
    "kit, on-policy": [
        "steps.total_policy_steps=2_048",
        "steps.update_epochs=1",
    ],
    "kit, off-policy": ["steps.total_policy_steps=256", "steps.learning_starts=128"],
    "sb3": ["steps.total_timesteps=1_024"],
    "cleanrl, on-policy": ["steps.total_timesteps=1_024"],
    "cleanrl": ["steps.total_timesteps=1_024", "steps.learning_starts=512"],
    "sheeprl": ["steps.total_steps=1_024"],
    "dreamer": ["steps.steps=96", "steps.batch_size=4", "steps.batch_length=16"],
    "dreamer-paper": [
        "steps.steps=800",
        "steps.seed_episodes=3",
        "steps.collect_interval=2",
        "steps.episode_length=200",
        "steps.action_repeat=1",
        "steps.batch_size=4",
        "steps.sequence_length=16",
    ],
    "tianshou": ["steps.num_epochs=1", "steps.step_per_epoch=2_048"],
    "tianshou2": ["steps.max_epochs=1", "steps.epoch_num_steps=2_048"],
}
COMMON = ["steps.evaluation_every=null", "steps.evaluation_episodes=1"]
QUIET = ["progress=false"]
STARTS = ("resume=", "start_from=", "init_from=")
"""Settings of commands that need an earlier run."""
RUN = "20251201-093000-s0"
"""The name of the interrupted run that the pages go on with, evaluate and look at."""


def commands() -> Iterator[tuple[str, int, str]]:
    """Page, line and text of each command, without its comment; those over several lines joined."""
    for page, line, code in blocks("(?:bash|sh|shell|console)"):
        joined = re.sub(r"\\\n\s*", lambda found: " " * len(found[0]), code)
        for number, text in enumerate(joined.splitlines(), line + 1):
            if words := shlex.split(text, comments=True):
                yield name_of(page), number, shlex.join(words)


SHELL = [
    pytest.param(text, id=f"{page}:{line}", marks=marks(page)) for page, line, text in commands()
]


def shortened(recipe: str, words: list[str]) -> list[str]:
    """The arguments of a recipe, with settings added under which it takes a second."""
    shows = {"--help", "--help=all", "--version"}
    if shows & set(words) or any(word.startswith("resume=") for word in words):
        return words
    named = dict(word.split("=", 1) for word in words if "=" in word)
    steps = importlib.import_module(recipe).Config().steps
    family = "on-policy" if isinstance(steps, OnPolicySteps) else "off-policy"
    vocabulary = named.get("steps", "kit")
    short = SHORT.get(f"{vocabulary}, {family}") or SHORT[vocabulary]
    common = COMMON if vocabulary == "kit" else []
    return [*words, *short, *common, *QUIET]


class Killed:
    """Ends a run in its fourth batch, as a kill would."""

    batches = 0

    def register(self, trainer, name="killed"):
        trainer.register_op("batch_process", self.look)

    def look(self, batch):
        self.batches += 1
        if self.batches == 4:
            raise RuntimeError("killed")


def interrupted(recipe: str) -> None:
    """Leave a run of a recipe behind that was killed, under the name that the pages give it."""
    module = importlib.import_module(recipe)
    short = shortened(recipe, ["checkpoint_every=32", "log_every=32"])
    short += ["steps.evaluation_every=32", "steps.evaluation_episodes=1"]
    with pytest.raises(SystemExit):
        main(module.Config, lambda cfg: module.build(cfg, hooks=[Killed()]), short)
    (run,) = Path("runs").glob("*/*/*/")
    run.rename(run.parent / RUN)


@pytest.mark.parametrize("command", SHELL)
def test_shell_command_runs(command, tmp_path, monkeypatch, capsys):
    program, *words = shlex.split(command)
    if program in NOT_RUN:
        pytest.skip(NOT_RUN[program])
    for package in {p for part, packages in NEEDS.items() if part in command for p in packages}:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if program == "kit":
        if words[0] in ("compare", "evaluate", "export", "record"):
            interrupted("recipes.ppo")
        if words[0] == "train" and words[1:]:
            module, given = f"recipes.{words[1]}", words[2:]
            if any(word.startswith(STARTS) for word in given):
                interrupted(module)
            words = ["train", words[1], *shortened(module, given)]
        assert kit(words) in (None, 0)
        assert capsys.readouterr().out or list(Path("runs").glob("*/*/*/metrics.csv"))
        return
    if words[0].endswith(".py"):  # a copy: python my_ppo.py
        recipe = Path(words[0]).stem.removeprefix("my_")
        assert kit(["new", recipe, words[0]]) == 0
        monkeypatch.setattr(sys, "argv", [words[0], *shortened(f"recipes.{recipe}", words[1:])])
        runpy.run_path(words[0], run_name="__main__")
        return
    assert (program, words[0]) == ("python", "-m"), "neither run nor listed as not run"
    module, *words = words[1:]
    if module.startswith("recipes."):
        if any(word.startswith(STARTS) for word in words):
            interrupted(module)
        words = shortened(module, words)
    else:
        interrupted("recipes.ppo")
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    if "--help" in words:
        assert "usage: " in capsys.readouterr().out
    elif module.startswith("recipes."):
        assert list(Path("runs").glob("*/*/*/metrics.csv"))


def test_pages_use_only_known_programs():
    programs = {text.split()[0] for _, _, text in commands()}
    assert programs - set(NOT_RUN) == {"python", "kit"}


# ---------------------------------------------------------------------- links and lists
def test_page_links_resolve():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_hooks_page_lists_every_stage_in_order():
    from kit.trainer.stages import SIGNATURES, STAGES

    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    row = r"^\| `(\w+)` \| (.+?) \| `(.+?)` \| .+? \| ?(\w*) \|$"
    listed = re.findall(row, text, re.MULTILINE)
    expected = [(s.name, s.when, SIGNATURES[s.signature][0], s.needs) for s in STAGES.values()]
    assert listed == expected


def test_readme_table_matches_benchmark_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = r"^\| (.+?)(?:, layers of \d+)? \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) \|"
    told = {name.lower(): (*figures,) for name, *figures in re.findall(row, text, re.MULTILINE)}
    results = (ROOT / "benchmarks" / "results" / "end_to_end.md").read_text(encoding="utf-8")
    row = r"^\| (.+): (\w+) \| ([\d.]+) \|(?:[^|]*\|){4} ([\d.]*) ?\|"
    measured: dict[str, dict[str, tuple[float, str]]] = {}
    for case, library, seconds, factor in re.findall(row, results, re.MULTILINE):
        measured.setdefault(case.lower(), {})[library] = float(seconds), factor
    assert told
    for case, figures in told.items():
        own, _ = measured[case].pop("kit")
        seconds, factor = min(measured[case].values())
        assert figures == (str(own), str(seconds), f"{float(factor):.1f}"), case
