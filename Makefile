# make demo    the built-in model, plain and speculative, side by side
# make test    the whole test suite
# make gguf    installs what GGUF files need (compiles llama.cpp: about ten minutes on one core)
# make check   formatting, linting, types
# Everything runs in .venv, which is made on first use; only python3 and make are assumed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A CPU build of torch is enough and small; set TORCH to another requirement (or to a local file) for a GPU.
TORCH  ?= torch==2.13.0

.PHONY: setup demo test gguf check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/foretoken generate --compare --explain --max-new-tokens 128

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

gguf: $(STAMP)
	$(BIN)/pip install --editable ".[gguf]"

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

clean:
	rm -rf $(VENV) build dist src/*.egg-info
