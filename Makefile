# Everything runs in .venv, which is made on first use and brought up to date when pyproject.toml changes.
# .ci/run calls these same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FLOWER := $(VENV)/flower
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
ARGS ?=
RESULTS ?= all
ROUNDS ?= 5
SEEDS ?= 1000
# The state machine runs long and reaches nothing that the rest does not.
COVERED ?= tests/core --deselect tests/core/test_machine.py

# One torch thread a process: more than there are cores is many times slower, not faster.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-deploy consortium reproduce-small test test-all test-random coverage test-ray test-flower test-libraries simulate-system simulate-nightly attack-secure-sum chaos check format docs bench clean

help:  ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv with metis and all tools (once)

$(STAMP): pyproject.toml constraints.txt
	@echo "make: environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "make: installing torch (the large one)"
	@$(PIP) install "$$(grep '^torch==' constraints.txt)"
	@echo "make: installing metis and the development tools"
	@$(PIP) install -c constraints.txt -e '.[dev,tables,deploy,tracking,fast,privacy,ckks,peft]'
	@touch $@

demo: $(STAMP)  ## eight hospitals in virtual time: waiting for everybody, SemiSync, and SemiSync without parameters
	$(BIN)/metis compare examples/consortium/federation.toml --set stop.rounds=1000 --set stop.seconds=60 --out runs/hospitals --force $(ARGS)

demo-deploy: $(STAMP)  ## a controller and four learners as processes with certificates; two of them are killed
	$(BIN)/python examples/deploy_demo.py runs/deploy

consortium: $(STAMP)  ## eight hospitals as processes over lines that are cut, Sync against SemiSync (ARGS='--seeds 20 --resume')
	$(BIN)/python examples/consortium/processes.py runs/consortium $(ARGS)

reproduce-small: $(STAMP)  ## the paper's tables and figures at small scale; data in METIS_DATA (RESULTS='table3')
	$(BIN)/metis reproduce $(RESULTS) --scale small --out runs/paper $(ARGS)

test: $(STAMP)  ## run the tests, except the slow ones (ARGS='-k fedrec' to choose)
	$(BIN)/python -m pytest -n 2 -m 'not slow' tests $(ARGS)

test-all: $(STAMP)  ## run all tests, also the slow ones (ARGS='-m slow' for those alone)
	$(BIN)/python -m pytest -n 2 tests $(ARGS)

test-random: $(STAMP)  ## what hypothesis checks, with other examples (ROUNDS=20, or SEED=4 to repeat one)
	@for round in $$(seq $(if $(SEED),1,$(ROUNDS))); do \
		seed=$(or $(SEED),$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')); \
		echo "make: examples of SEED=$$seed"; \
		$(BIN)/python -m pytest -n 2 -m hypothesis -o timeout=900 tests \
			--hypothesis-profile=random --hypothesis-seed=$$seed $(ARGS) || exit 1; \
	done

coverage: $(STAMP)  ## fails unless tests/core covers every branch of core (COVERED=tests: also reports on the rest)
	@mkdir -p .cache
	$(BIN)/python -m coverage run -m pytest -q $(COVERED) $(ARGS)
	$(if $(filter tests,$(COVERED)),$(BIN)/python -m coverage report --omit='src/metis/core/*' --sort=cover | tail -n 60)
	$(BIN)/python -m coverage report --include='src/metis/core/*' --fail-under=100

test-ray: $(STAMP)  ## the tests that start Ray clusters; installs Ray
	@$(PIP) install -c constraints.txt -e '.[ray]'
	METIS_TEST_RAY=1 $(BIN)/python -m pytest tests/simulation/pools/test_ray.py $(ARGS)

# Flower pins older releases of what the commands use, so it gets an environment of its own on top of .venv.
test-flower: $(STAMP)  ## the tests with the newest Flower that is allowed; skipped where it cannot be installed
	@test -x $(FLOWER)/bin/python || $(PYTHON) -m venv $(FLOWER)
	@{ echo "$(CURDIR)/src"; $(BIN)/python -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")'; } \
		> "$$(echo $(FLOWER)/lib/python3*/site-packages)/metis.pth"
	@wanted=$$(sed -n 's/^flower = \["\([^;"]*\).*/\1/p' pyproject.toml); \
	if $(FLOWER)/bin/python -m pip --disable-pip-version-check -qqq install -c constraints.txt -U "$$wanted"; then \
		$(FLOWER)/bin/python -m pytest -m 'not slow' tests/flower $(ARGS); \
	else echo "make: $$wanted cannot be installed here; its tests are skipped"; fi

test-libraries: $(STAMP)  ## engines, NVFlare and libraries of the field with the real packages; installs them
	@$(PIP) install -c constraints.txt -e '.[jax,sklearn,nvflare,export,mlflow,peft,libraries]'
	$(BIN)/python -m pytest -n 2 tests/learning/test_engines.py tests/bridges/test_nvflare.py tests/test_libraries.py tests/cli/test_export.py $(ARGS)

simulate-system: $(STAMP)  ## the deployed code under simulated network, disk and clock (SEEDS=1000; ARGS='--seed 7 --trace')
	$(BIN)/python tests/system/run.py $(if $(findstring --,$(ARGS)),,--seeds 0:$(SEEDS)) $(ARGS)

simulate-nightly: $(STAMP)  ## 20,000 seeds that nobody has played, every rare branch, every planted bug; hours
	$(BIN)/python tests/system/run.py --seeds $$(date +%-j)0000:$$(($$(date +%-j) * 10000 + 20000)) --reached --sometimes
	$(BIN)/python tests/system/run.py --bug all --results build/bugs-found.json

attack-secure-sum: $(STAMP)  ## 10,000 schedules of the secure sum, an adversarial controller up to 13 members, every guard deleted
	$(BIN)/python tests/privacy/schedules.py 10000
	$(BIN)/python -m pytest -q tests/privacy/test_adversary.py
	$(BIN)/python tests/privacy/guards.py

chaos: $(STAMP)  ## try the fault matrix on real processes, a line a row (ARGS='5 17 --times 2', ARGS=--list)
	$(BIN)/python tests/deployment/chaos/run.py $(ARGS)

check: $(STAMP)  ## formatting, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

format: $(STAMP)  ## format and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## build the documentation site; open build/site/index.html
	$(BIN)/python docs/build.py

bench: $(STAMP)  ## run the benchmarks, about half an hour, and write benchmarks/RESULTS.md (ARGS=--quick: tiny, checked, 2 minutes)
	$(BIN)/python benchmarks $(ARGS)

clean:  ## remove .venv, caches and run directories
	rm -rf $(VENV) runs build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
