# On a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNTIME := $(VENV)/.runtime
ARENA := $(VENV)/.arena
HGF_VENV := .venv-hgf
HGF := $(HGF_VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

.PHONY: demo paper-demo paper calibration systems arena arena-docs arena-check test test-all lint docs bench soak attack build clean

# every package by version and hash; the lock files are complete, so that no dependencies are looked for.
# This one is what a user needs, and what `make demo` sets up; the tools of development come on top of it
$(RUNTIME): pyproject.toml requirements-runtime.lock requirements-torch.lock requirements-torch-cpu.lock
	@echo "Setting up $(VENV): torch, and the other packages that pcnet needs ..."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --require-hashes -r requirements-torch-cpu.lock 2> /dev/null || $(INSTALL) --require-hashes -r requirements-torch.lock
	@$(INSTALL) --require-hashes -r requirements-runtime.lock
	@$(INSTALL) --no-build-isolation -e .
	@touch $(RUNTIME)

$(STAMP): $(RUNTIME) requirements.lock
	$(INSTALL) --require-hashes -r requirements.lock
	touch $(STAMP)

demo: $(RUNTIME)  ## a neuron seen through one noisy electrode, told nothing of the noise; figures and a page go to output/demo
	@$(BIN)/python examples/demo.py

paper-demo: $(RUNTIME)  ## the paper's process, tracked with both of its models; figures go to output/paper-demo
	$(BIN)/python examples/paper_demo.py

paper: $(STAMP)  ## the whole study of the paper: 2 x 1512 inversions of 10,000 observations, figures and a report in output/paper
	$(BIN)/python -m studies.paper output/paper

calibration: $(STAMP)  ## 100 held-out seeds a cell beside Kalman filters that are told the noise; a report in output/calibration; goes on where it stopped
	$(INSTALL) --require-hashes -r requirements-calibration.lock
	$(BIN)/python -m studies.calibration output/calibration

systems: $(STAMP)  ## the adaptive filter on forty-nine systems of many kinds, with ablations; a report in output/systems; goes on where it stopped
	$(BIN)/python -m studies.systems output/systems
	$(BIN)/python -m studies.systems output/ablations --ablations --first-seed 3000 --seeds 8 --only stiff,chaotic,sine,neuron,outliers,channels,irregular,jump

$(ARENA): $(STAMP) requirements-calibration.lock requirements-arena.lock
	$(INSTALL) --require-hashes -r requirements-calibration.lock -r requirements-arena.lock
	touch $(ARENA)

# pyhgf needs an older jax than the other rivals; without it the arena runs, and says so
$(HGF): requirements-arena-hgf.lock
	-$(PYTHON) -m venv $(HGF_VENV) && $(HGF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-arena-hgf.lock && touch $(HGF)

arena: $(ARENA) $(HGF)  ## filters of other packages on the same data with the same information, in 20 minutes; goes on where it stopped
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m studies.arena output/arena

arena-docs: arena  ## the same, and its report into docs/arena.md and the table of the README
	$(BIN)/python -m studies.arena.publish output/arena

arena-check: $(STAMP)  ## three tasks with five seeds, against stored figures of pcnet and its rivals
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m studies.arena.check

test: lint  ## lint, types and the quick tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(STAMP)  ## the documentation into output/docs, for reading from disk; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)  ## microseconds an observation, beside filters of other packages in the same run; PYHGF: a python that has pyhgf
	$(BIN)/python examples/benchmark.py $(if $(PYHGF),--pyhgf $(PYHGF))
	$(BIN)/python examples/benchmark_size.py

soak: $(STAMP)  ## a million observations: constant memory, sound beliefs, the same digits after a resumption
	$(BIN)/python examples/soak.py

attack: $(STAMP)  ## damage, kills, outliers and nonsense, many times over, in a quarter of an hour; a table of tries and failures, with WRITE=1 into the docs
	OMP_NUM_THREADS=1 $(BIN)/python tests/attack.py $(if $(WRITE),--write)

test-all: lint  ## all tests, with whole-run reproductions that take minutes, and most of them again with compiled code
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow"
	PCNET_ENGINE=compiled $(BIN)/python -m pytest -n 2 --dist worksteal tests/contract tests/oracle tests/system
	$(MAKE) arena-check

build: $(STAMP)  ## wheel and sdist into dist/
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) $(HGF_VENV) dist build output .mypy_cache .ruff_cache .pytest_cache .hypothesis
