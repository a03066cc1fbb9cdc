"""The command ``kit train``: train a built-in recipe or a recipe in a file."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from kit.runs.recipe import Recipe
from kit.steps import SettingError

USAGE = """\
usage: kit train RECIPE [setting=value ...]

Train a recipe.

examples:
  kit train ppo env.id=Acrobot-v1 seed=1
  kit train ppo --help                    settings of a recipe
  kit train my_ppo.py                     same as: python my_ppo.py

List the recipes with: kit recipes"""


def main(words: Sequence[str]) -> int:
    """Run the command ``kit train``. Return the exit code: 0, or 2 if there is no such recipe."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        recipe = Recipe.named(words[0])
    except SettingError as error:
        print(f"kit: {error}", file=sys.stderr)
        return 2
    gc.disable()  # importing PyTorch creates no garbage; launch.main() enables collection again
    from kit.cli.launch import main as launch

    module = recipe.load()
    launch(module.Config, module.build, words[1:])
    return 0
