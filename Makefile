# `make demo` on a fresh machine: an environment, then the whole workflow on the starter data.
# Programs are called as modules: scripts in .venv/bin break where the path has a space.
PYTHON ?= python3
RUN := .venv/bin/python -m
OTHER_MACHINES := gpu or slurm or ray or s3
# Of `make test`, a file's tests in one: many wait for the imports of processes that they start.
TEST_PROCESSES ?= 2

.PHONY: demo install check test test-slow test-cluster test-exhaustive bench gpu-check clean

demo: install
	$(RUN) kedro run

install: .venv/.installed

# Without build isolation, so that it works offline once setuptools is there.
.venv/.installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	$(RUN) pyright --version
	touch $@

.venv/.bench: .venv/.installed
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev,bench]"
	touch $@

check: install
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright
	.venv/bin/python -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_logo=True))"
	find notebooks -name '*.ipynb' -not -path '*/.*' -exec $(RUN) nbstripout --verify --keep-id {} +
	$(RUN) pytest -q -rP tests/test_budgets.py

test: install
	$(RUN) pytest -n $(TEST_PROCESSES) --dist loadfile -m "not (slow or $(OTHER_MACHINES))"

# pytest ends with 5 if it finds no test.
test-slow: install
	$(RUN) pytest -m "slow and not (exhaustive or $(OTHER_MACHINES))" || test $$? -eq 5

# Every cell of the tables of docs/ that `make test-slow` tries a sample of; half an hour.
test-exhaustive: install
	$(RUN) pytest -m exhaustive

# On a Slurm and a Ray of two nodes each that the tests start by themselves; Slurm needs the packages
# slurm-wlm and munge, and is skipped without. `pytest -m slurm` also waits for Slurm's time limit.
test-cluster: install
	$(RUN) pytest -m "(slurm or ray) and not slow"

bench: .venv/.bench
	.venv/bin/python benchmarks/run.py $(NAME) $(if $(LENGTHS),--lengths "$(LENGTHS)") $(if $(SEED),--seed "$(SEED)")

# The system's own torch and the worker's packages: no .venv here.
gpu-check:
	@PYTHONPATH=src $(PYTHON) .ci/gpu_check.py

# What a run made stays; without its fingerprints, the next run does everything anew.
clean:
	rm -rf data/.fingerprints dist build .ruff_cache .pytest_cache .hypothesis .import_linter_cache .viz
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
