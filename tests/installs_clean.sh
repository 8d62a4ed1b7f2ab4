#!/bin/sh
# installs_clean.sh ARCHIVE: into an environment of its own, away from the source; a study must run there.
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
.venv/bin/fedsweep run "${2:-quickstart}" --results results
test -s results/tables/README.md
echo "$(basename "$archive") installs clean and runs"
