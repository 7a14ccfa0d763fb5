# Everything runs in .venv, which is made on first use; only python3 and make are assumed.
# A target's help is what stands behind its ##.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.installed
CODE   := src tests benchmarks examples docs/*.py .ci/*.py setup.py
# A CPU build of torch is enough and small; set TORCH to another requirement (or to a local file) for a GPU.
TORCH  ?= torch==2.13.0
# llama.cpp compiled with AMX ends the process with an illegal instruction (its pull request 26954).
NO_AMX := $(shell grep -qs amx_tile /proc/cpuinfo && echo -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
# Which of how many parts of the slow tests `make test-slow` runs: PART=1/2 and PART=2/2 have run each of them once.
PART   ?= 1/1
# A part of them that `make test` runs besides, in the same processes, such as SLOW=1/64: tests are collected once.
SLOW   ?=

.PHONY: help setup demo test test-slow test-all gguf check format docs reference readme plots first-hour wheels release docs-version hooks clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(STAMP) ## make .venv and install everything that development needs

# What the command needs, and what development needs besides: who wants to see the demo does not wait for the second.
$(READY): pyproject.toml
	@echo "making $(VENV) and installing PyTorch and foretoken into it: minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable .
	@touch $(READY)

$(STAMP): $(READY)
	@echo "installing what tests and docs need: minutes, once"
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $(STAMP)

demo: $(READY) ## a chat model (fetched once, 93 MB; else the built-in one), plain beside speculative
	@$(BIN)/foretoken demo --fetch

test: $(STAMP) ## the tests that every change needs: minutes, and every kind of cell at least once
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(if $(SLOW),--slow-part $(SLOW),-m "not slow")

test-slow: $(STAMP) ## the other tests: all cells of the matrices, training, other families
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow --slow-part $(PART)

test-all: test test-slow ## the whole test suite

gguf: $(STAMP) ## install what GGUF files need (compiles llama.cpp: about ten minutes on one core)
	CFLAGS="$$CFLAGS $(NO_AMX)" CXXFLAGS="$$CXXFLAGS $(NO_AMX)" $(BIN)/pip install --editable ".[gguf]"

check: $(STAMP) ## formatting, linting, types
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

format: $(STAMP) ## format the code and fix what the linter can fix
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

docs: $(STAMP) ## build the site into site/, strictly and offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: $(STAMP) ## make the gallery of methods and the tutorials' outputs again
	$(BIN)/python docs/make_gallery.py
	$(BIN)/python docs/run_page.py docs/tutorial.md docs/zh/tutorial.md

plots: $(STAMP) ## draw the plots of the pages on theory again
	$(BIN)/python docs/make_plots.py

first-hour: ## walk a new user's path in an empty folder, and write its page with what it printed and took
	$(PYTHON) docs/make_first_hour.py

readme: $(STAMP) ## make the README's picture and tables again
	$(BIN)/python docs/make_readme.py

wheels: ## build the wheel, install it under Python 3.11, 3.12 and 3.13, and use it there
	TORCH="$(TORCH)" .ci/wheels

release: ## build sdist, wheels, list of contents and checksums into dist/, and use them in clean environments (TRIAL=1: not ready yet)
	TORCH="$(TORCH)" $(PYTHON) .ci/release.py $(if $(TRIAL),--trial)

docs-version: $(STAMP) ## put the site of this version on the branch gh-pages, as VERSION and as latest (nothing is pushed)
	$(BIN)/pip install --quiet "mike>=2.1,<3"
	PATH="$(abspath $(BIN)):$$PATH" DOCS_VERSIONS=mike NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $$($(BIN)/python -c "import foretoken; print(foretoken.__version__.rpartition('.')[0])") latest
	$(BIN)/mike set-default latest

hooks: $(STAMP) ## install the pre-commit hooks
	$(BIN)/pip install --quiet pre-commit
	$(BIN)/pre-commit install

clean: ## remove .venv and what was built
	rm -rf $(VENV) build dist site src/*.egg-info
