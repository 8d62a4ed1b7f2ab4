#!/bin/sh
# install.sh LOCKFILE: install the pinned packages and this package into .venv. Uses uv if it is available or can be
# installed (it takes less than half the time), else pip.
set -eu
pip="$PWD/.venv/bin/python -m pip --disable-pip-version-check"
uv=$(command -v uv || echo .venv/bin/uv)
[ -x "$uv" ] || $pip install --quiet uv 2>/dev/null || uv=
if [ -n "$uv" ]; then
  # uv does not read pip's configuration: pass on its find-links
  set -- "$1" $($pip config list | sed -n "s/^.*find-links='\(.*\)'$/\1/p" | tr ' ' '\n' | sort -u | sed 's/^/--find-links=/')
  echo "installing $1 with uv"
  file=$1; shift
  # compile bytecode now, as pip does; otherwise every process of the first sweep compiles its imports
  "$uv" pip install --python .venv/bin/python --compile-bytecode --quiet "$@" -r "$file" && done=yes ||
    echo "uv failed; trying pip"
fi
if [ -z "${done:-}" ]; then
  echo "installing ${file:-$1} with pip; this takes some minutes"
  $pip install --quiet -r "${file:-$1}"
fi
$pip install --quiet --no-deps --no-build-isolation -e . 2>/dev/null || $pip install --quiet --no-deps -e .
