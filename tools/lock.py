"""Writes the lock files: every package with its version and the hashes of all its files, for Linux on x86 and ARM.

Run by `make lock`, with uv. `requirements.lock` is what fedsweep needs to run. The others hold what is needed besides:
torch for CPUs (`-cpu`) or GPUs (`-cuda`), `-s3` for results on S3, `-dev` to test, and `-build` to install all this.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HEADER = "# Written by 'make lock'; installed by tools/install.sh, which checks the hashes.\n"
BUILD = ("setuptools", "uv")
CUDA = re.compile("(cuda|nvidia)-|(torch|triton)$")
CPU_BUILDS = (
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # x86
    "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # ARM
)
"""Hashes of torch+cpu, which PyPI does not have: wheels of download.pytorch.org for Python 3.11."""

Lock = dict[str, str]
"""Package -> its lines in a lock file."""


def compile_lock(*options: str, source: str = "pyproject.toml") -> Lock:
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-annotate", "--no-header"]
    text = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:], "--python-version", "3.11.5", *options, source],
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    lock: Lock = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        name = entry.partition("==")[0]
        lock[name] = re.sub(r" ; [^\\]*", " ", entry.rstrip(), count=1)  # needed on all machines
    return lock


def versions(text: str) -> list[str]:
    """The entries of lock files without conditions and hashes."""
    return sorted(set(re.findall(r"^[\w.-]+==[^\s;]+", text, re.MULTILINE)))


def write(name: str, lock: Lock) -> None:
    Path(name).write_text(HEADER + "".join(f"{entry}\n" for _, entry in sorted(lock.items())), encoding="utf-8")


def main() -> None:
    """Options are passed on to uv, for example `--upgrade`. Without it, known versions are kept where possible."""
    scratch = Path(".venv-lock")
    known = "".join(file.read_text(encoding="utf-8") for file in sorted(Path().glob("requirements*.lock")))
    (scratch / "known.txt").write_text("\n".join(versions(known)))
    (scratch / "build.in").write_text("\n".join(BUILD))
    keep = [] if "--upgrade" in sys.argv else ["--constraint", str(scratch / "known.txt")]
    everything = compile_lock("--extra", "dev", "--extra", "s3", *keep)
    (scratch / "all.txt").write_text("\n".join(versions("".join(f"{entry}\n" for entry in everything.values()))))
    same = ("--constraint", str(scratch / "all.txt"))
    runs, s3 = compile_lock(*same), compile_lock("--extra", "s3", *same)
    build = compile_lock(*keep, source=str(scratch / "build.in"))
    cuda = {name: entry for name, entry in everything.items() if CUDA.match(name)}
    write("requirements.lock", {name: entry for name, entry in runs.items() if name not in {*cuda, *build}})
    write("requirements-cuda.lock", cuda)
    hashes = "".join(f" \\\n    --hash=sha256:{known}" for known in CPU_BUILDS)
    write("requirements-cpu.lock", {"torch": f"{cuda['torch'].split()[0]}+cpu{hashes}"})
    write("requirements-build.lock", build)
    write("requirements-s3.lock", {name: entry for name, entry in s3.items() if name not in runs})
    others = everything.keys() - runs.keys() - cuda.keys() - build.keys()
    write("requirements-dev.lock", {name: everything[name] for name in others})


main()
