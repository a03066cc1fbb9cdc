# `make train` and `make test` set up a virtual environment in .venv when it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# What touches torch, TorchRL, Gymnasium and Hydra; the others are the same with any version of them.
CORE := tests/test_*.py tests/collectors tests/envs tests/hooks tests/modules

.PHONY: help train test test-slow test-gpu chaos fuzz test-wheel test-lowest lint format bench clean

help:
	@echo "make train        train PPO on CartPole-v1 and say where the learning curve is"
	@echo "make test         run the tests that take seconds (all but slow and gpu)"
	@echo "make test-slow    run the tests that take minutes"
	@echo "make test-gpu     run the tests that need a GPU"
	@echo "make chaos        kill runs at every file operation and at random times"
	@echo "make fuzz         build and run every recipe with random settings"
	@echo "make test-wheel   build the wheel and run a recipe from it"
	@echo "make test-lowest  run the tests with the lowest supported torch and torchrl (3 GB)"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite what it can"
	@echo "make bench        run the benchmarks and write their tables"

train: $(VENV)/.run
	$(BIN)/python -m recipes.ppo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m "slow and not gpu"

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -n 4 -m gpu

chaos: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m slow -rP tests/chaos

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz

test-wheel: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

test-lowest: $(VENV)-lowest/.dev
	$(VENV)-lowest/bin/python -m pytest -n auto $(CORE)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(BIN)/python pyproject.toml
	$(PIP) install -e .
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(PIP) install -e ".[dev]"
	touch $@ $(VENV)/.run

$(VENV)/.bench: $(BIN)/python pyproject.toml
	$(PIP) install -e ".[dev,bench]"
	touch $@

$(VENV)-lowest/.dev: pyproject.toml .ci/lowest.py
	$(PYTHON) -m venv $(VENV)-lowest
	$(PYTHON) .ci/lowest.py > $(VENV)-lowest/constraints.txt
	$(VENV)-lowest/bin/python -m pip --disable-pip-version-check -q install \
		-c $(VENV)-lowest/constraints.txt -e ".[dev]"
	touch $@
