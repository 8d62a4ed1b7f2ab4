"""Small deliberate faults, one at a time, and whether the fast tests notice: `make mutants`.

cosmic-ray makes the faults. Its own way to run them starts Python anew for each, which takes longer than the tests:
instead everything that is not ours is imported once, and every fault lives and dies in a fork, where an import hook
gives the faulty module out in place of the real one. No file is touched. A first run without a fault learns which lines
each test runs: a fault is shown to those that run its line, the quickest first. One that makes a program go on for ever
is stopped by the seconds of processor it has used, in units of what the faultless run took: how loaded a machine is
does not matter.

    python tests/mutants.py                           all modules
    python tests/mutants.py trainables/privacy        what lies there
    python tests/mutants.py --every 10                a tenth of the faults

Survivors that nothing could tell from the real thing are listed, with a reason each, in `mutants_equivalent.json`. What
was counted, and how many lines the tests run, is kept in `mutants.md`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import io
import itertools
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
COUNTED = Path(__file__).with_name("mutants.md")
OF_METHODS = (
    *("tests/test_goldens.py", "tests/test_methods.py", "tests/test_observed_releases.py", "tests/test_user_level.py"),
    *("tests/test_fednew.py", "tests/test_tree.py", "tests/test_glm.py", "tests/test_sampling.py"),
)
OF_SEARCH = ("tests/test_search.py", "tests/test_tables.py")


def _of(folder: str, tests: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {str(path.relative_to(ROOT)): tests for path in sorted((ROOT / folder).glob("*.py")) if path.read_text()}


TESTS: dict[str, tuple[str, ...]] = {
    **_of("trainables/privacy", ("tests/test_privacy.py",)),
    "trainables/privacy/noise.py": ("tests/test_noise.py", "tests/test_goldens.py"),
    "trainables/privacy/plan.py": (
        "tests/test_privacy.py",
        "tests/test_sampling.py",
        "tests/test_preprocess.py",
        "tests/test_observed_releases.py",
    ),
    "trainables/privacy/sampled.py": ("tests/test_sampling.py",),
    "trainables/privacy/selection.py": ("tests/test_selection.py",),
    "trainables/data/partition.py": ("tests/test_partition.py", "tests/test_goldens.py"),
    "orchestrator/results/ledger.py": ("tests/test_ledger.py",),
    **_of("orchestrator/search", OF_SEARCH),
    **_of("trainables/methods", OF_METHODS),
    **_of("orchestrator/report/tables", ("tests/test_tables.py",)),
}
"""Which tests are to notice a fault in a module; those that start Ray are left out."""
FAST = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not chaos and not nodes")
NOT_OURS = [
    "numpy",
    "scipy.stats",
    "torch",
    "pandas",
    "ray",
    "optuna",
    "dp_accounting",
    "hypothesis",
    "pydantic",
    "yaml",
    "typer",
    "mpmath",
    "markdown_it",
]
SWAPPED = (
    ("Add", "Sub"),
    ("Mul", "Div"),
    ("Lt", "LtE"),
    ("Gt", "GtE"),
    ("Eq", "NotEq"),
    ("Is", "IsNot"),
    ("In", "NotIn"),
)
OPERATORS = (
    *("core/AddNot", "core/NumberReplacer", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd"),
    *("core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "core/ZeroIterationForLoop"),
    *("core/ReplaceUnaryOperator_USub_UAdd", "core/ReplaceUnaryOperator_Delete_Not"),
    *("core/ReplaceBinaryOperator_Pow_Mul", "core/ReplaceBinaryOperator_FloorDiv_Div"),
    *(
        f"core/Replace{kind}Operator_{one}_{other}"
        for pair in SWAPPED
        for one, other in (pair, pair[::-1])
        for kind in (("Binary",) if pair[0] in ("Add", "Mul") else ("Comparison",))
    ),
)
LONGEST = 10
"""How many times the faultless run's seconds of processor a faulty one may use."""


@dataclass(frozen=True)
class Fault:
    module: str
    code: str
    line: int
    change: str

    @property
    def name(self) -> str:
        return f"{self.module}: {self.change}"

    def alike(self, known: dict[str, str]) -> bool:
        """Whether it is listed, for its module or for all, as one that makes no difference."""
        return self.name in known or f"everywhere: {self.change}" in known


def faults(module: str) -> Iterator[Fault]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source, seen = (ROOT / module).read_text(), set()
    for name in (name for name in OPERATORS if name in set(operator_names())):
        occurrence = 0
        while (code := mutate_code(source, get_operator(name)(), occurrence)) is not None:
            occurrence += 1
            if code not in seen and code != source:
                seen.add(code)
                yield _described(module, source, code)


def _described(module: str, source: str, code: str) -> Fault:
    before, after = source.splitlines(), code.splitlines()
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            old, new = (" ".join(line.strip() for line in some) for some in (before[i:i_end], after[j:j_end]))
            return Fault(module, code, i + 1, f"{old}  ->  {new}")
    raise AssertionError("a fault that changes nothing")


class _Instead(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: str) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str):
        return compile(self._code, self.path, "exec")


class _Finder:
    def __init__(self, module: str, code: str) -> None:
        self.name, self.path = module.removesuffix(".py").replace("/", "."), str(ROOT / module)
        self.code = code

    def find_spec(self, name: str, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=_Instead(name, self.path, self.code))


@dataclass(frozen=True)
class Learnt:
    """What a faultless run of some tests showed."""

    seconds: dict[str, float]
    """Of every test."""
    lines: dict[str, dict[int, list[str]]]
    """By module and line, the tests that run it."""
    share: dict[str, float]
    """The share of a module's lines that the tests run, in percent."""

    def tests_of(self, module: str, line: int) -> list[str]:
        """Those that run the line, the quickest first; of a line that runs on import those that run any of it."""
        runs = self.lines[module]
        mine = set(runs.get(line, ())) or {test for tests in runs.values() for test in tests} or set(self.seconds)
        return sorted(mine, key=lambda test: self.seconds[test])


class _Learning:
    """Which lines every test runs, and how long it takes."""

    def __init__(self, modules: list[str]) -> None:
        import coverage

        self.modules, self.seconds = modules, {}
        self.measure = coverage.Coverage(include=[str(ROOT / module) for module in modules], data_file=None)
        self.measure.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.measure.switch_context(item.nodeid)
        began = time.process_time()
        found = yield
        self.seconds[item.nodeid] = time.process_time() - began
        self.measure.switch_context("")
        return found

    def learnt(self) -> Learnt:
        self.measure.stop()
        data = self.measure.get_data()
        lines = {
            module: {
                line: [test for test in tests if test]
                for line, tests in data.contexts_by_lineno(str(ROOT / module)).items()
            }
            for module in self.modules
        }
        share = {m: self.measure.report(include=[str(ROOT / m)], file=io.StringIO()) for m in self.modules}
        return Learnt(self.seconds, lines, share)


class _Chosen:
    """Some of the tests, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.place = {test: i for i, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )


def _forked(work, seconds: float | None = None) -> tuple[int, bytes]:
    """What comes of it in a process of its own: its exit code, none if it was ended, and what it has to say."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if seconds is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.close(reading)
            code, said = work()
            with open(writing, "wb") as out:
                out.write(said)
            os._exit(code)
        finally:
            os._exit(99)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said


def learn(modules: list[str], tests: tuple[str, ...]) -> Learnt | None:
    """None if the tests fail without any fault."""

    def work():
        learning = _Learning(modules)
        failed = pytest.main([*FAST, *tests], plugins=[learning])
        return int(failed), pickle.dumps(learning.learnt())

    failed, said = _forked(work)
    return None if failed else pickle.loads(said)


def survives(fault: Fault, learnt: Learnt) -> bool:
    tests = learnt.tests_of(fault.module, fault.line)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)

    def work():
        sys.meta_path.insert(0, _Finder(fault.module, fault.code))
        return int(pytest.main([*FAST, *files], plugins=[_Chosen(tests)])), b""

    seconds = sum(learnt.seconds[test] for test in tests)
    return _forked(work, LONGEST * seconds + 30)[0] == 0


# ---- what came of it, kept beside


@dataclass(frozen=True)
class Row:
    module: str
    faults: int
    noticed: int
    alike: int
    lines: str
    commit: str
    date: str


def kept() -> dict[str, Row]:
    rows = [line.strip("| \n").split(" | ") for line in COUNTED.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): Row(row[0].strip("`"), *map(int, row[1:4]), *row[4:]) for row in rows}


def keep(row: Row) -> None:
    rows = kept() if COUNTED.exists() else {}
    rows = {name: some for name, some in (rows | {row.module: row}).items() if name in TESTS}
    found = [rows[name] for name in TESTS if name in rows]
    COUNTED.write_text(
        "# Faults that the fast tests notice\n\n"
        f"Written by `make mutants`: {verdict(found)}\n\n"
        "| module | faults | noticed | make no difference | lines run | module as of | counted |\n"
        "|---|---|---|---|---|---|---|\n"
        + "".join(
            f"| `{r.module}` | {r.faults} | {r.noticed} | {r.alike} | {r.lines} | {r.commit} | {r.date} |\n"
            for r in found
        )
    )


def share_of(rows: list[Row]) -> float:
    return sum(r.noticed for r in rows) / max(1, sum(r.faults - r.alike for r in rows))


def verdict(rows: list[Row]) -> str:
    noticed, alike = sum(r.noticed for r in rows), sum(r.alike for r in rows)
    noticeable = sum(r.faults for r in rows) - alike
    return (
        f"{noticed} of {noticeable} faults noticed ({100 * share_of(rows):.1f}%), {noticeable - noticed} survived, "
        f"{alike} more make no difference."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("where", nargs="*", help="modules or folders; all, if none is named")
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth fault; then nothing is kept")
    parser.add_argument("--tests", nargs="*", help="instead of the module's own")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in NOT_OURS:
        importlib.import_module(name)
    known = json.loads(EQUIVALENT.read_text())
    modules = [m for m in TESTS if not given.where or any(m.startswith(place.rstrip("/")) for place in given.where)]
    rows = []
    for tests, some in itertools.groupby(modules, lambda module: tuple(given.tests or TESTS[module])):
        together = list(some)
        learnt = learn(together, tests)
        if learnt is None:
            print(f"{' '.join(tests)}: fail without any fault")
            return 2
        for module in together:
            mine = list(faults(module))[:: given.every]
            left = []
            for fault in mine:
                if survives(fault, learnt):
                    left.append(fault)
                    if not fault.alike(known):
                        print(f"  survived  {module}:{fault.line}  {fault.change}", flush=True)
            commit, date = (
                subprocess.check_output(words, text=True).strip()
                for words in (("git", "log", "-1", "--format=%h", "--", module), ("date", "-u", "+%Y-%m-%d"))
            )
            alike = sum(fault.alike(known) for fault in left)
            row = Row(module, len(mine), len(mine) - len(left), alike, f"{learnt.share[module]:.0f}%", commit, date)
            rows.append(row)
            print(f"{module}: {verdict([row])} {row.lines} of its lines run.", flush=True)
            if given.every == 1:
                keep(row)
    print(verdict(rows))
    return int(share_of(rows) < 0.95)


if __name__ == "__main__":
    sys.exit(main())
