# Two commands on a fresh machine with Python >= 3.11 and make:
#   make run    makes .venv, installs, runs the quickstart study
#   make test   makes .venv, installs, checks and tests everything
#   make goldens  says which computed results have changed, and writes the new ones down
#   make chaos  kills and damages what a sweep stands on, for three quarters of an hour
#   make nodes  sweeps over clusters of several nodes on this machine, and to S3
#   make data   fetches the papers' data and puts them through their backbones
#   make reproduce  runs the papers' studies and sets them beside the papers: a few minutes on a large GPU
#   make peers  the same round through other simulators, each installed beside, and through ours
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: run test goldens chaos nodes data reproduce peers check install lock clean

run: install
	$(BIN)/fedsweep run quickstart --results results/quickstart

test: check
	$(BIN)/python -m pytest

goldens: install
	$(BIN)/python tests/goldens.py

chaos: install
	$(BIN)/python -m pytest tests/test_faults.py -m "chaos or not chaos" --counts-into docs/faults.md

nodes: install
	$(BIN)/python -m pytest -m "nodes"

data: install
	$(BIN)/fedsweep data prepare cifar10-resnet20 cifar10-vgg16 pathmnist-resnet20 pathmnist-vgg16 adult-a9a heart-disease

reproduce: install
	$(BIN)/python -m benchmarks.reproduce --page docs/reproduction.md

peers: install .venv-flower/.installed .venv-pfl/.installed
	$(BIN)/python benchmarks/peers.py

.venv-%/.installed: benchmarks/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedsweep needs Python 3.11 or newer; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# Renew the pins: resolve pyproject.toml afresh and write down what was chosen (a "+cpu" build is the same release).
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet pip-tools
	.venv-lock/bin/pip-compile --quiet --extra dev --no-emit-index-url --no-emit-find-links --strip-extras --no-annotate \
	  --no-header --output-file .venv-lock/lock pyproject.toml
	{ echo "# Written by 'make lock' from pyproject.toml; installed with pip by 'make install'."; \
	  sed -e 's/+cpu//' -e '/^#/d' -e '/^$$/d' .venv-lock/lock; } > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache
