# Everything starts here: `make demo` and `make test` set themselves up.
PYTHON ?= python3
BIN := .venv/bin

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: .venv/ready ## Make .venv with the pinned versions (once)

.venv/ready: pyproject.toml constraints.txt
	@echo "installing the pinned packages into .venv (1.6 GB or more, some minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## FedOBP, FedAvg (+FT), FedPer, Local-Only and centralized training on embedded data; prints a table (no network)
	$(BIN)/python -m fedpfl.train experiment=demo
	$(BIN)/python -m fedpfl.report figures outputs/demo --out outputs/demo

test test-all: export PYTHONDONTWRITEBYTECODE = # they start hundreds of processes, which need not compile all anew

TESTS = $(BIN)/pytest -n auto --dist worksteal $(addprefix tests/,$(ROOM))

test: setup ## Each promise once (ROOM="engine methods": these rooms' tests alone)
	$(TESTS)

test-all: setup ## The same with all products: methods by settings by engines, fuzzing, clusters
	$(TESTS) -m "full or not full"

smoke: setup ## The quickest end-to-end check: a few rounds of every method on digits
	$(BIN)/python -m fedpfl.train experiment=smoke

lint: setup ## Style, formatting, spelling and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

types: setup ## Types only
	$(BIN)/mypy

bench: setup ## Tables of speed beside plain loops and bare kernels, in minutes
	$(BIN)/python -m benchmarks tables

tables: setup ## Tables of all runs in outputs/, and the paper's as far as there are runs
	$(BIN)/python -m fedpfl.report tables outputs
	$(BIN)/python -m fedpfl.report paper outputs --only tables

figures: setup ## Figures of all runs in outputs/, and the paper's as far as there are runs
	$(BIN)/python -m fedpfl.report figures outputs --out outputs/figures
	$(BIN)/python -m fedpfl.report paper outputs --only figures --out outputs/figures

report: setup ## A page for the browser per experiment in outputs/
	$(BIN)/python -m fedpfl.report html outputs

docs: setup ## The site of the documentation, in build/site (docs-serve shows it while you write)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict --site-dir build/site

docs-serve: setup
	$(BIN)/mkdocs serve

release: setup ## Build, try, commit and tag a version (VERSION=0.3.0)
	$(BIN)/python scripts/release.py "$(VERSION)"

clean: ## Remove the environment and caches; runs in outputs/ stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache *.egg-info build dist

.PHONY: help setup demo test test-all smoke lint types bench tables figures report docs docs-serve release clean
.DEFAULT_GOAL := help
