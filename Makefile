# Two commands on a fresh machine with Python >= 3.11 and make:
#   make run    makes .venv, installs, runs the quickstart study
#   make test   makes .venv, installs, checks and tests everything
#   make fuzz   throws ten thousand bad inputs of every kind at what reads them
#   make mutants  puts small faults into the code and counts those that the fast tests do not notice
#   make goldens  says which computed results and which tables have changed, and writes the new ones down
#   make chaos  kills and damages what a sweep stands on, for three quarters of an hour
#   make nodes  sweeps over clusters of several nodes on this machine, and to S3
#   make sums   the tests against oracles once more, with other kernels and other ways of summing
#   make audits attacks every method under every option
#   make data   fetches the papers' data and puts them through their backbones
#   make table3 the main paper's table 3 beside ours
#   make reproduce  runs the papers' studies and sets them beside the papers: about an hour on a large GPU
#   make docs   the documentation as a site, in site/
#   make dist   a wheel and a source archive, tried in empty environments
#   make peers  the same round through other simulators, each installed beside, and through ours
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test fuzz mutants goldens chaos nodes sums audits data table3 reproduce peers check install lock docs dist clean

run: .venv/.runs
	$(BIN)/fedsweep run quickstart --results results/quickstart
	@echo "the command is $(BIN)/fedsweep; in a shell after '. $(BIN)/activate' it is fedsweep"

# Three files at a time, also on two cores: many of them wait for processes of their own.
test: check
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Ten thousand of each kind of what comes from outside.
fuzz: install
	FEDSWEEP_FUZZ=10000 $(BIN)/python -m pytest tests/test_fuzz.py -o timeout=0

# Small deliberate faults, and whether the fast tests notice; MUTANTS names modules or folders.
mutants: install .venv/.mutants
	$(BIN)/python tests/mutants.py $(MUTANTS)

.venv/.mutants: tests/mutants.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

goldens: install
	$(BIN)/python tests/goldens.py

chaos: install
	$(BIN)/python -m pytest tests/test_faults.py -m "chaos or not chaos" --counts-into docs/faults.md

nodes: install
	$(BIN)/python -m pytest -m "nodes"

# How a library adds up a product depends on the processor: these are the other ways that can be forced on this one.
WAYS := ATEN_CPU_CAPABILITY=default \
  $(if $(filter x86_64,$(shell uname -m)),MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 OPENBLAS_CORETYPE=HASWELL,OPENBLAS_CORETYPE=ARMV8)
ORACLES := $(addprefix tests/test_,methods.py kernel.py clipping.py fednew.py glm.py mlp.py preprocess.py user_level.py)
sums: install
	for way in $(WAYS); do \
	  echo "torch's kernels with $$way" && env FEDSWEEP_KERNEL=torch $$way \
	    $(BIN)/python -m pytest -q -n 2 -k "twin or loops or definition or hosts or lanes" $(ORACLES) || exit; done

audits: install
	$(BIN)/python -m pytest -n 2 -m "audits"

data: install
	$(BIN)/fedsweep data prepare cifar10-resnet20 cifar10-vgg16 pathmnist-resnet20 pathmnist-vgg16 adult-a9a heart-disease \
	  emnist-balanced-pca100 cifar10-resnet44

# The main paper's table 3 beside ours, with what explains its differences, and nothing else.
table3: install
	$(BIN)/fedsweep data prepare cifar10-resnet20
	$(BIN)/python -m benchmarks.reproduce --only paper-cifar10-resnet20 --only paper-cifar10-as-released \
	  --work build/table3 --keep results/table3
	@echo "the table is results/table3/compare/dp-fedsofim-table-3.md, what it comes to findings.md beside it"

reproduce: install
	$(BIN)/python -m benchmarks.reproduce --page docs/reproduction.md

peers: install .venv-flower/.installed .venv-pfl/.installed
	$(BIN)/python -m benchmarks.peers

.venv-%/.installed: benchmarks/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Running needs less than testing: the second kind of install comes on top of the first.
install: .venv/.tests

.venv/.runs: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedsweep needs Python 3.11 or newer; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "making .venv"
	@$(PYTHON) -m venv .venv
	@tools/install.sh requirements.lock
	@touch $@

.venv/.tests: .venv/.runs requirements-dev.lock
	@tools/install.sh requirements-dev.lock
	@touch $@

# Renew the pins: resolve pyproject.toml afresh and write down what was chosen (a "+cpu" build is the same release).
COMPILE := .venv-lock/bin/pip-compile --quiet --no-emit-index-url --no-emit-find-links --strip-extras --no-annotate --no-header
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet pip-tools
	$(COMPILE) --extra dev --output-file .venv-lock/dev pyproject.toml
	$(COMPILE) --constraint .venv-lock/dev --output-file .venv-lock/runs pyproject.toml
	for part in runs dev; do \
	  test $$part = runs && file=requirements.lock || file=requirements-dev.lock; \
	  { echo "# Written by 'make lock' from pyproject.toml; installed by tools/install.sh."; \
	    sed -e 's/+cpu//' -e '/^#/d' -e '/^$$/d' .venv-lock/$$part; } > $$file; done
	rm -rf .venv-lock

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site
	@echo "the site is in site/index.html"

# A wheel and a source archive, each installed into an environment of its own that runs a study.
dist: install
	rm -rf dist && $(BIN)/python -m build --outdir dist .
	for file in dist/*; do tests/installs_clean.sh $$file; done

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache site dist build
