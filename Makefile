# Two commands for a fresh clone: `make demo` and `make test`. Both make the virtual environment when it is missing.
#   TORCH   the PyTorch to install, e.g. TORCH=torch for the newest CUDA build
#   PYTHON  the interpreter that makes the environment
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt pyproject.toml $(wildcard quantize/native/*)

.PHONY: demo test lint check clean

demo: $(VENV)/.runtime
	$(BIN)/exl3-dflash demo

test: $(VENV)/.dev
	$(BIN)/pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python $(NATIVE)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python $(NATIVE)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.runtime
