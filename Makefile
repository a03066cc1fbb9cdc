# `make train` and `make test` set up a virtual environment in .venv when it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# What touches torch, TorchRL, Gymnasium and Hydra; the others are the same with any version of them.
CORE := tests/test_*.py tests/collectors tests/envs tests/hooks tests/modules

.PHONY: help train check test test-slow nightly test-gpu chaos fuzz mutations durations
.PHONY: test-wheel test-lowest lint format docs gallery bench clean

help:
	@echo "make train        train PPO on CartPole-v1 and say where the learning curve is"
	@echo "make check        30-second smoke test: train, kill and resume, explain steps"
	@echo "make test         run the fast tests (4 minutes on two cores)"
	@echo "make test-slow    run the tests that take longer than 0.3 CPU seconds each"
	@echo "make nightly      run everything that takes long: nightly tests, fuzz, mutations, lowest versions"
	@echo "make test-gpu     run the tests that need a GPU"
	@echo "make chaos        kill runs at every file operation and at random times"
	@echo "make fuzz         build and run every recipe with random settings"
	@echo "make mutations    mutate the modules that must be exact, and list mutants that tests miss"
	@echo "make durations    run fast and slow tests and record how long each takes"
	@echo "make test-wheel   build the wheel and run a recipe from it"
	@echo "make test-lowest  run the tests with the lowest supported torch and torchrl (3 GB)"
	@echo "make lint         ruff, mypy and codespell"
	@echo "make format       let ruff rewrite what it can"
	@echo "make docs         build the documentation site in docs/_build/html"
	@echo "make gallery      train the runs of the gallery and of the notebooks, and draw them"
	@echo "make bench        run the benchmarks and write their tables"

train: $(VENV)/.run
	$(BIN)/python -m recipes.ppo

check: $(VENV)/.dev
	$(BIN)/python -m pytest -v tests/test_smoke.py

test: $(VENV)/.dev
	@$(BIN)/python tests/tiers.py fast
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(VENV)/.dev
	@$(BIN)/python tests/tiers.py slow
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

durations: $(VENV)/.dev
	rm -f tests/durations.json
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not nightly and not gpu" --durations-file

nightly: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m nightly
	$(MAKE) fuzz mutations test-lowest

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -n 4 -m gpu

chaos: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m nightly -rP tests/chaos

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz

mutations: $(VENV)/.dev
	$(BIN)/python .ci/mutations.py

test-wheel: $(VENV)/.dev
	$(BIN)/python -m pytest -m nightly tests/test_wheel.py

test-lowest: $(VENV)-lowest/.dev
	$(VENV)-lowest/bin/python -m pytest -n auto $(CORE)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html

gallery: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gallery

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist docs/_build docs/api *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(BIN)/python pyproject.toml
	$(PIP) install -e .
	touch $@

# Tests read sheeprl's config files. Its dependencies pin another torch.
$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(PIP) install -e ".[dev]"
	$(PIP) install --no-deps sheeprl==0.8.4
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
