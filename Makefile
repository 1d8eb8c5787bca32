# Two commands do everything on a fresh machine: `make demo` and `make test`. Both build .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml constraints.txt

.PHONY: demo test test-triton lint notebooks train clean

demo: $(VENV)/.demo  ## install the library and continue a prompt with the checkpoint that ships with it
	$(BIN)/glm5fn generate

test: $(VENV)/.test  ## every test: the quick ones side by side, then those that measure time or memory, alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not serial"
	$(BIN)/python -m pytest -m serial
	$(MAKE) test-triton

TRITON_OPS := norm conv kda mla indexer quant mhc
TRITON_TESTS := tests/triton $(foreach kind,contract property,$(TRITON_OPS:%=tests/$(kind)/test_%.py)) tests/contract/test_moe.py

test-triton: $(VENV)/.test  ## the Triton kernels in Triton's interpreter, which has to have a process of its own
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto --dist worksteal --backend triton $(TRITON_TESTS)

lint: $(VENV)/.test  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

notebooks: $(VENV)/.test  ## execute the notebooks in place, after a change to them or to the checkpoint
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

train: $(VENV)/.test  ## train the checkpoint again (stop at any time, the same command resumes)
	$(BIN)/python -m training.train --run runs/pydoc

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "glm5fn needs Python 3.10 or newer: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(SOURCES) | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(SOURCES) | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e '.[test,triton,notebook,bench]'
	touch $@ $(VENV)/.demo
