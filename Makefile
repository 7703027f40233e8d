# `make demo` and `make test` do everything on a fresh machine, set-up included.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test nightly lint types docs setup clean help

PYTHON ?= python3
BIN := .venv/bin
# A stamp's name holds a checksum of what it was made from, so that a changed pyproject.toml refreshes it.
KEY := $(shell cat pyproject.toml tools/setup.sh | cksum | cut -d' ' -f1)
RUN := .venv/.ready-run-$(KEY)
DEV := .venv/.ready-dev-$(KEY)

# Two workers on two cores: more threads inside each only fight, and a fixed count keeps float sums in one order.
TEST_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
JOBS ?= 2
# What to give pytest besides, for example: make test ARGS="-k quant"
ARGS ?=

help:
	@echo "make demo     compile a real model, simulate it, print accuracy and cycles"
	@echo "make test     everything CI runs: lint, types, generated docs, all tests but the slow ones"
	@echo "make nightly  the same with the slow tests"
	@echo "make lint     ruff and basedpyright only"
	@echo "make docs     write docs/reference/ anew from the tables"

$(RUN): pyproject.toml tools/setup.sh
	@PYTHON=$(PYTHON) bash tools/setup.sh run
	@touch $@

$(DEV): pyproject.toml tools/setup.sh
	@PYTHON=$(PYTHON) bash tools/setup.sh dev
	@touch $@ $(RUN)

setup: $(DEV)

demo: $(RUN)
	@$(BIN)/python -m tilewright.demo

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/basedpyright

docs: $(DEV)
	$(BIN)/python tools/gen.py

test: lint types
	$(BIN)/python tools/gen.py --check
	$(TEST_ENV) $(BIN)/pytest -n $(JOBS) -m "not slow" $(ARGS)

nightly: lint types
	$(BIN)/python tools/gen.py --check
	$(TEST_ENV) $(BIN)/pytest -n $(JOBS) --hypothesis-profile=nightly $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build
