#!/bin/sh
# installs_clean.sh ARCHIVE [STUDY]: install it into an empty environment, away from the source, and run a study there.
set -eu
archive=$(realpath "$1")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check "$archive"
.venv/bin/fedsweep --version
.venv/bin/fedsweep doctor
.venv/bin/python -c 'import fedsweep; print(fedsweep.__version__, fedsweep.__file__)'
# benchmarks/ belongs to the repository only
.venv/bin/python -c 'from importlib.util import find_spec; assert find_spec("benchmarks") is None'
.venv/bin/fedsweep run "${2:-quickstart}" --results results
test -s results/tables/README.md
echo "$(basename "$archive") installs and runs"
