# `make train` runs the main job, `make test` the checks; both need nothing but Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint faults fuzz simulate bench docker-test clean

train: .venv/ready
	$(BIN)/stageline train examples/digits/stageline.toml

test: lint
	$(BIN)/pytest -n 2 --dist worksteal

lint: .venv/ready build/types/stageline
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The package under the name it is imported by, for mypy, which does not read setup.py.
build/types/stageline:
	mkdir -p $@
	for part in pipeline broker workers; do ln -sfn ../../../$$part $@/$$part; done
	for file in __init__.py __main__.py py.typed; do ln -sfn ../../../workers/api/$$file $@/$$file; done

# Kills processes at every place of small runs, for about an hour; goes on where it was interrupted.
faults: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m simulation.run_seeds --seeds 20000
	$(BIN)/pytest -m faults
	PYTHONPATH=tests $(BIN)/python -m faults.run_sweep

# What reads from wires, for a minute, under a fuzzer.
fuzz: .venv/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	PYTHONPATH=tests $(BIN)/python -m fuzz.fuzz_wire -max_total_time=60

bench: .venv/ready
	$(BIN)/python -m benchmarks

# Recovery under ten times the seeds that `make test` runs; a seed that fails is printed with the command to see it.
simulate: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m simulation.run_seeds --seeds 20000

# Needs a Docker engine with Compose; BASE_IMAGE names the interpreter's image if it is not python:3.11-slim.
docker-test: .venv/ready
	$(BIN)/python docker/test/run.py

.venv/ready: setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stageline needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Use make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[examples,test]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
