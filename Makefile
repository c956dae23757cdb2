# `make train` runs the main job, `make test` the checks; both need nothing but Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n 4 --dist worksteal
RUN := PYTHONPATH=tests $(BIN)/python -m
export PYTHONDONTWRITEBYTECODE :=  # what each process would compile again is kept, also where the variable is set

.PHONY: docs docs-check train test test-quick test-all test-engines chromium sweep lint faults fuzz simulate mutants bench docker-test sbom audit shape clean

train: .venv/ready
	$(BIN)/stageline train examples/digits/stageline.toml

# What each change must pass: a few minutes. mypy keeps one core busy: tests begin beside it.
test: .venv/checks
	$(MAKE) --jobs=2 lint test-quick

test-quick: .venv/checks
	$(PYTEST)

# What `make test` leaves out: whole matrices, long runs, more seeds.
test-all: .venv/checks
	$(PYTEST) -n 3 -o timeout=300 -m slow

# Pages in a browser, and other programs that take what a run gives them. Screenshots are in build/engines.
test-engines: .venv/engines chromium build/promtool/usr/bin/promtool
	$(BIN)/pytest -o timeout=300 -m engines tests/engines

# Debian's Chromium, unless it is there. Needs to be root.
chromium:
	@test -x /usr/bin/chromium || { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } || { echo "make test-engines needs /usr/bin/chromium, and apt-get could not install it: be root, or install it by hand" >&2; exit 1; }

# Debian's tool that reads Prometheus' files, unpacked here: the package itself would start a server.
build/promtool/usr/bin/promtool:
	mkdir -p build/promtool
	rm -f build/promtool/prometheus_*.deb
	cd build/promtool && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } && dpkg -x prometheus_*.deb . || { echo "make test-engines needs promtool, and apt-get could not download Debian's package prometheus: run apt-get update as root" >&2; exit 1; }

# Longer ones of which `make test-all` has a part, for changes of what they test; properties with many examples.
sweep: .venv/checks
	$(PYTEST) -n 2 -o timeout=900 -m sweep
	$(PYTEST) -n 2 -o timeout=900 -m hypothesis --hypothesis-profile=many

lint: .venv/checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# 20,000 seeds, then kills processes of 150 runs from the command line, for about 25 minutes, and at every place of
# small runs, for about an hour; what was interrupted continues. `make faults FAULTS="--trials 60"` runs so many of each.
faults: simulate
	$(RUN) faults.run_cold $(FAULTS)
	$(RUN) faults.run_sweep $(FAULTS)

# Recovery under 20,000 seeds; a seed that fails is printed with the command that repeats it.
simulate: .venv/checks
	$(RUN) simulation.run_seeds --seeds 20000
	$(RUN) simulation.run_seeds --seeds 4000 --script

# 200 mutants of the core, drawn by a seed, and the tests that kill them: hours. ROOT=... mutates another checkout.
mutants: .venv/checks
	$(RUN) mutants $(if $(ROOT),--root $(ROOT)) $(MUTANTS)

# The decoders of what comes over a wire, for a minute, under a fuzzer.
fuzz: .venv/checks
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	$(RUN) fuzz.fuzz_wire -max_total_time=60

# The documentation site, in build/site. To search it, serve it: python -m http.server -d build/site
docs: .venv/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/assemble.py build/docs
	$(BIN)/zensical build --strict --clean
	$(BIN)/python docs/assemble.py --finish build/site

# Needs Node.js, its package registry and Chromium. PAGES=... checks pages with that in their name only.
docs-check: docs
	npm install --silent --no-save --prefix build/check puppeteer-core@24.43.1 axe-core@4.14.1
	node docs/check.mjs $(PAGES)

bench: .venv/checks
	$(BIN)/python -m benchmarks

# Size, names, tests, composition, and the files that a microbatch and a heartbeat pass. ROOT=... measures another
# checkout, HITS=--hits lists every place that is counted, WRITE=--write puts these files into ARCHITECTURE.md.
shape: .venv/checks
	$(BIN)/python -m benchmarks.shape $(ROOT) $(HITS) $(WRITE)

# Needs a Docker engine with Compose; BASE_IMAGE names the interpreter's image if it is not python:3.11-slim.
docker-test: .venv/checks
	$(BIN)/python docker/test/run.py

# The bill of materials of stageline and what it needs, build/sbom.json (CycloneDX), from the metadata of what is
# installed. Once build/audit is there, nothing is asked over a network.
sbom: .venv/ready build/audit/ready
	build/audit/bin/cyclonedx-py environment $(BIN)/python --of JSON --output-reproducible -o build/environment.json
	$(BIN)/python docker/bill.py stageline build/environment.json > build/sbom.json

# Known vulnerabilities of what is installed, as PyPI tells them. Not in CI: the answer changes without a change here.
audit: .venv/ready build/audit/ready
	build/audit/bin/python docker/audit.py $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The tools of these two, which have no place beside what they look at.
build/audit/ready:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet 'cyclonedx-bom>=7.5' 'pip-audit>=2.10'
	touch $@

.venv/ready: setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stageline needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Use make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[examples]'
	touch $@

# What the checks need besides.
.venv/checks: .venv/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[examples,test]'
	touch $@

# What the tests in a browser need besides.
.venv/engines: .venv/checks
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[examples,test,engines]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
