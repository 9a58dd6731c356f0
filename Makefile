# Needs nothing but Python 3.11 or later and make; everything is installed into .venv.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
BIN := .venv/bin

.PHONY: train test lint types unit chaos fidelity bench clean

train: .venv/installed
	$(BIN)/hasten train --epochs 10
	@echo "Open the report.html of that folder in a browser."

test: lint types unit

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/installed
	$(BIN)/mypy

# Two at a time, a file each: many tests wait for processes of their own, and share launches in a file.
# In their order, for xdist's own begins the files of few tests last, chaos among them: one worker
# then waits for the other for minutes.
unit: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# A hundred faults at random moments of a run: kill -9, full disks, removed folders and the like.
chaos: .venv/installed
	$(BIN)/python tests/chaos/chaos.py --trials 100

# Every operator of PyTorch's database on the simulated accelerator; writes docs/fidelity.md.
fidelity: .venv/installed
	$(BIN)/python -W ignore tools/fidelity.py --write docs/fidelity.md

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
