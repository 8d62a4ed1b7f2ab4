#!/bin/sh
# install.sh LOCKFILE: what it pins, into .venv, and this package itself. With uv where it is there or can be had (it
# takes less than half as long), else with pip.
set -eu
pip="$PWD/.venv/bin/python -m pip --disable-pip-version-check"
uv=$(command -v uv || echo .venv/bin/uv)
[ -x "$uv" ] || $pip install --quiet uv 2>/dev/null || uv=
if [ -n "$uv" ]; then
  # uv does not read pip's settings: where pip was told to look, it is told too
  set -- "$1" $($pip config list | sed -n "s/^.*find-links='\(.*\)'$/\1/p" | tr ' ' '\n' | sort -u | sed 's/^/--find-links=/')
  echo "installing what $1 pins, with uv"
  file=$1; shift
  # compiled once, as pip does it: else every process of a sweep compiles what it imports until it has been written down
  "$uv" pip install --python .venv/bin/python --compile-bytecode --quiet "$@" -r "$file" && done=yes ||
    echo "uv could not; trying pip"
fi
if [ -z "${done:-}" ]; then
  echo "installing what ${file:-$1} pins, with pip: this takes some minutes"
  $pip install --quiet -r "${file:-$1}"
fi
$pip install --quiet --no-deps --no-build-isolation -e . 2>/dev/null || $pip install --quiet --no-deps -e .
