# `make demo` and `make test` set up everything by themselves, once: a virtual environment in .venv with torch from the
# pin in constraints.txt, then this package with its native core, built against that torch.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/ready
	$(BIN)/manyclass demo

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/ready
	$(BIN)/manyclass bench draws

.venv/torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	touch $@

.venv/ready: .venv/torch pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable '.[cli]'
	touch $@

clean:
	rm -rf .venv build out
