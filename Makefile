# On a machine with Python >= 3.11 and make; every target creates .venv and installs what it needs:
#   make run        run the quickstart study
#   make test       lint, type-check and test
#   make long       the longest tests, which make test leaves out (about 10 minutes)
#   make check      lint and type-check only
#   make fuzz       test all input parsers with ten thousand malformed inputs of each kind
#   make mutants    insert small faults into the code and count those that the fast tests miss
#   make goldens    recompute the golden results and tables, and list the changes
#   make chaos      fault-injection tests (about an hour)
#   make nodes      tests on clusters of several nodes on this machine, and on S3
#   make sums       repeat the tests against oracles with other kernels and summation orders
#   make audits     privacy audits of every method under every option, and long tests of all methods
#   make audit-examples  audit an Opacus script and a Flower app, as they are and with planted faults
#   make data       download the papers' data and extract features
#   make table3     reproduce table 3 of the main paper
#   make reproduce  run the papers' studies and compare with the papers (about an hour on a large GPU)
#   make docs       build the documentation site in site/
#   make dist       build a wheel and a source archive, and test both in empty environments
#   make peers      time the same round in other simulators and in fedsweep
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test long fuzz mutants goldens chaos nodes sums audits audit-examples data table3 reproduce peers check install lock docs dist clean

run: .venv/.runs
	$(BIN)/fedsweep run quickstart --results results/quickstart
	@echo "run more with $(BIN)/fedsweep, or activate the environment: . $(BIN)/activate"

# Three workers even on two cores: many tests wait for subprocesses.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
test: check
	$(PYTEST) --durations=40 --durations-min=4

long: install
	$(PYTEST) -m "long" --durations=20

fuzz: install
	FEDSWEEP_FUZZ=10000 $(BIN)/python -m pytest tests/test_fuzz.py -o timeout=0

# MUTANTS: modules or folders to mutate; default: all.
mutants: install .venv/.mutants
	$(BIN)/python tests/mutants.py $(MUTANTS)

.venv/.mutants: tests/mutants.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

goldens: install
	$(BIN)/python tests/goldens.py

chaos: install
	$(BIN)/python -m pytest tests/test_faults.py tests/test_unreliable_nodes.py tests/test_bad_storage.py -m "chaos or not chaos" \
	  --cache-clear --counts-into docs/faults.md

nodes: install
	$(BIN)/python -m pytest -m "nodes"

# The summation order of a matrix product depends on the processor; these variables force other orders on this one.
VARIANTS := ATEN_CPU_CAPABILITY=default \
  $(if $(filter x86_64,$(shell uname -m)),MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 OPENBLAS_CORETYPE=HASWELL,OPENBLAS_CORETYPE=ARMV8)
ORACLES := $(addprefix tests/test_,methods.py kernel.py clipping.py fednew.py glm.py mlp.py preprocess.py user_level.py)
sums: install
	for variant in $(VARIANTS); do \
	  echo "torch kernels with $$variant" && env FEDSWEEP_KERNEL=torch $$variant \
	    $(BIN)/python -m pytest -q -n 2 -k "twin or loops or definition or hosts or lanes" $(ORACLES) || exit; done

audits: install
	$(BIN)/python -m pytest -n 2 -m "audits"

audit-examples: install .venv-opacus/.installed .venv-flower-audit/.installed
	examples/audit/check.sh $(BIN)/fedsweep .venv-opacus/bin/python examples/audit/opacus_program.py --adjacency zero-out
	examples/audit/check.sh $(BIN)/fedsweep .venv-flower-audit/bin/python examples/audit/flower_program.py

.venv-opacus/.installed: examples/audit/opacus.txt
.venv-flower-audit/.installed: examples/audit/flower.txt
.venv-opacus/.installed .venv-flower-audit/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

data: install
	$(BIN)/fedsweep data prepare cifar10-resnet20 cifar10-vgg16 pathmnist-resnet20 pathmnist-vgg16 adult-a9a heart-disease \
	  emnist-balanced-pca100 cifar10-resnet44

table3: install
	$(BIN)/fedsweep data prepare cifar10-resnet20
	$(BIN)/python -m benchmarks.reproduce --only paper-cifar10-resnet20 --only paper-cifar10-as-released \
	  --work build/table3 --keep results/table3
	@echo "table: results/table3/compare/dp-fedsofim-table-3.md; findings: results/table3/compare/findings.md"

reproduce: install
	$(BIN)/python -m benchmarks.reproduce --page docs/reproduction.md

peers: install .venv-flower/.installed .venv-pfl/.installed .venv-opacus/.installed
	$(BIN)/python -m benchmarks.peers

.venv-%/.installed: benchmarks/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Running needs fewer packages than testing: .tests installs on top of .runs.
install: .venv/.tests

.venv/.runs: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedsweep needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "making .venv"
	@$(PYTHON) -m venv .venv
	@tools/install.sh requirements.lock
	@touch $@

.venv/.tests: .venv/.runs requirements-dev.lock
	@tools/install.sh requirements-dev.lock
	@touch $@

# Resolve the dependencies again and write the lock files, with the hashes of all files. UPGRADE=--upgrade: newest versions.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --require-hashes -r requirements-build.lock
	.venv-lock/bin/python tools/lock.py $(UPGRADE)
	rm -rf .venv-lock

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site
	@echo "the site is in site/index.html"

dist: install
	rm -rf dist && $(BIN)/python -m build --outdir dist .
	for file in dist/*; do tests/installs_clean.sh $$file || exit; done

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache site dist build
