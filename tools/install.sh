#!/bin/sh
# install.sh LOCKFILE: install the locked packages and this package into .venv, and check their hashes. Uses uv, which takes
# less than half the time, else pip.
set -eu
pip="$PWD/.venv/bin/python -m pip --disable-pip-version-check"
checked="--require-hashes --no-deps"
[ -x .venv/bin/uv ] || $pip install --quiet $checked -r requirements-build.lock
# uv does not read pip's configuration: pass on its find-links
links=$($pip config list | sed -n "s/^.*find-links='\(.*\)'$/\1/p" | tr ' ' '\n' | sort -u | sed 's/^/--find-links=/')

# --compile-bytecode, as pip does: otherwise every process of the first sweep compiles its imports.
# --system-certs, as pip does: a company's proxy may sign with a certificate that only the system knows.
with_uv() {
  .venv/bin/uv pip install --python .venv/bin/python --compile-bytecode --system-certs --quiet $checked $links -r "$1"
}

install() {
  echo "installing $1"
  with_uv "$1" || { echo "uv failed; trying pip, which takes some minutes"; $pip install --quiet $checked -r "$1"; }
}

install "$1"
# a torch for CPUs, if a known one is at hand; else PyPI's, with CUDA's libraries
with_uv requirements-cpu.lock 2>/dev/null || install requirements-cuda.lock
$pip install --quiet --no-deps --no-build-isolation -e .
