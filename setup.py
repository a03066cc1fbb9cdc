"""Package the recipes: ``recipes/`` of a clone is ``kit/builtin/recipes/`` of the wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["kit*"]), "kit.builtin.recipes"],
    package_dir={"kit.builtin.recipes": "recipes"},
    package_data={"kit": ["py.typed"], "kit.builtin.recipes": ["presets/*/*.yaml"]},
)
