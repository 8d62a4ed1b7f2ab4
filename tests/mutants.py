"""Small deliberate faults, one at a time, and whether the fast tests notice: `make mutants`.

cosmic-ray makes the faults. Its own way to run them starts Python anew for each, which takes longer than the tests:
instead the tests are read once, and every fault lives and dies in a fork, where the faulty function takes the real
one's place; what runs on import is imported anew, from an import hook that gives the faulty module out. No file is
touched. A first run without a fault learns which lines each test runs: a fault is shown to those that run its line, the
quickest first. One that survives there, in a function that also runs while modules are imported, is tried a second
time, imported anew. One that makes a program go on for ever is stopped by the seconds of processor it has used, in
units of what the faultless run took: how loaded a machine is does not matter.

    python tests/mutants.py                           all modules
    python tests/mutants.py trainables/privacy        what lies there
    python tests/mutants.py --every 10                a tenth of the faults
    python tests/mutants.py --sample 20               at most twenty of every module
    python tests/mutants.py --left                    those that survived last time, once there are tests for them;
                                                      quickly so with `--tests` and the files that have the new ones
    python tests/mutants.py --named                   faults that once passed unnoticed, and which test notices now
    python tests/mutants.py --jobs 12 --minutes 8     twelve at a time; what is not tried by then is left out, evenly
    python tests/mutants.py --seconds 30              what tests of 30 s together do not notice counts as survived

Faults that nothing could tell from the real thing are listed, with a reason each, in `mutants_equivalent.json`, and are
not tried. What was counted, and how many lines the tests run, is kept in `mutants.md`, what survived in
`mutants_left.json`. Faults that somebody once put in by hand and that no test noticed are in `mutants_named.json`; they
come first, and each must be noticed.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import dataclasses
import difflib
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
NAMED = Path(__file__).with_name("mutants_named.json")
COUNTED = Path(__file__).with_name("mutants.md")
LEFT = Path(__file__).with_name("mutants_left.json")
OF_METHODS = tuple(
    f"tests/test_{name}.py"
    for name in (
        *("methods", "goldens", "observed_releases", "adaptive_clipping", "banded", "fednew", "sampling", "user_level"),
        *("secret_participation", "glm", "privacy", "tree", "mlp"),
    )
)
OF_SEARCH = ("tests/test_search.py", "tests/test_search_details.py", "tests/test_private_search.py")

OF_TABLES = ("tests/test_tables.py", "tests/test_table_details.py", "tests/test_table_snapshots.py")


def _of(folder: str, tests: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {str(path.relative_to(ROOT)): tests for path in sorted((ROOT / folder).glob("*.py")) if path.read_text()}


TESTS: dict[str, tuple[str, ...]] = {
    **_of("trainables/privacy", ("tests/test_privacy.py",)),
    "trainables/privacy/noise.py": ("tests/test_noise.py", "tests/test_goldens.py"),
    "trainables/privacy/plan.py": ("tests/test_privacy.py", "tests/test_sampling.py"),
    "trainables/privacy/sampled.py": ("tests/test_sampling.py",),
    "trainables/privacy/private_selection.py": ("tests/test_selection.py", "tests/test_private_search.py"),
    "trainables/data/partition.py": ("tests/test_partition.py", "tests/test_goldens.py"),
    "orchestrator/results/ledger.py": ("tests/test_ledger.py",),
    **_of("orchestrator/search", OF_SEARCH),
    **_of("trainables/methods", OF_METHODS),
    "trainables/methods/__init__.py": ("tests/test_plugins.py",),
    **_of("orchestrator/report/tables", OF_TABLES),
}
"""Which tests are to notice a fault in a module; those that start Ray are left out."""
del TESTS["trainables/privacy/noise_triton.py"]  # which runs on GPUs alone: `pytest -k cuda tests/test_noise.py`
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
WITHIN = "everywhere, within a line: "
"""Begins an entry of `mutants_equivalent.json` that is about a part of a line, wherever it stands."""
QUICKEST = 5
"""How many tests are run first, where they must be read anew for every fault."""
LONGEST = 10
"""How many times the seconds of processor of the faultless run a faulty one may use."""


@dataclass(frozen=True)
class Fault:
    module: str
    code: str
    line: int
    change: str

    def alike(self, known: dict[str, str]) -> bool:
        """Whether it is listed, for its module or for all, as one that makes no difference."""
        if f"{self.module}: {self.change}" in known or f"everywhere: {self.change}" in known:
            return True
        return any(self._swaps(*rule.removeprefix(WITHIN).split("  ->  ")) for rule in known if rule.startswith(WITHIN))

    def _swaps(self, part: str, other: str) -> bool:
        """Whether one such part of a line, and nothing else, has become the other."""
        old, _, new = self.change.partition("  ->  ")
        pieces = old.split(part)
        return any(part.join(pieces[:n]) + other + part.join(pieces[n:]) == new for n in range(1, len(pieces)))


def faults(module: str) -> Iterator[Fault]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source, seen = (ROOT / module).read_text(), set()
    for name in (name for name in OPERATORS if name in set(operator_names())):
        occurrence = 0
        while (code := mutate_code(source, get_operator(name)(), occurrence)) is not None:
            occurrence += 1
            if code not in seen and code != source and _compiles(code) and _operates(name, source, code):
                seen.add(code)
                yield _described(module, source, code)


def _compiles(code: str) -> bool:
    """Not so where a `**` that is no power has become a product."""
    try:
        compile(code, "fault", "exec")
    except SyntaxError:
        return False
    return True


def _operates(name: str, source: str, code: str) -> bool:
    """Not so where a `*` among parameters, which is no product, has become a `/`."""

    def operations(text: str) -> list[str]:
        return [
            type(node.op).__name__ for node in ast.walk(ast.parse(text)) if isinstance(node, ast.BinOp | ast.AugAssign)
        ]

    return "BinaryOperator" not in name or operations(source) != operations(code)


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
        self.name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.path = str(ROOT / module)
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
    missed: dict[str, set[int]]
    """By module, the lines that no test runs."""
    statements: dict[str, int]
    on_import: dict[str, set[int]]
    """By module, the lines that run outside of any test, while modules or tests are read."""
    failed: list[str]
    """Tests that fail without any fault, and can notice none."""
    patience: float = math.inf
    """Of a fault's tests so many seconds are run, the quickest first."""

    def share(self, module: str) -> float:
        """Of a module's lines, those that the tests run, in percent."""
        return 100 * (1 - len(self.missed[module]) / max(1, self.statements[module]))

    def with_others(self, others: Learnt) -> Learnt:
        """What some tests showed and what others did."""
        lines = {
            module: {line: [*mine.get(line, ()), *theirs.get(line, ())] for line in {**mine, **theirs}}
            for module, mine, theirs in ((m, self.lines[m], others.lines[m]) for m in self.lines)
        }
        missed = {module: self.missed[module] & others.missed[module] for module in self.missed}
        on_import = {module: self.on_import[module] | others.on_import[module] for module in self.on_import}
        failed = self.failed + others.failed
        return Learnt({**self.seconds, **others.seconds}, lines, missed, self.statements, on_import, failed)

    def tests_of(self, module: str, line: int) -> list[str]:
        """Those that run the line, the quickest first."""
        return self._quickest_first(self.lines[module].get(line, ())) or self.tests_of_all()

    def tests_of_all(self) -> list[str]:
        """Not only those that run some of it: others may use what it says on import."""
        return self._quickest_first(self.seconds)

    def _quickest_first(self, tests: Iterable[str]) -> list[str]:
        ordered = sorted(tests, key=lambda test: self.seconds[test])
        until = itertools.accumulate(self.seconds[test] for test in ordered)
        return [test for test, seconds in zip(ordered, until, strict=True) if seconds <= self.patience] or ordered[:1]


class _Learning:
    """Which lines every test runs, and how long it takes; of the tests, every so-manieth."""

    def __init__(self, modules: list[str], first: int, every: int) -> None:
        import coverage

        self.modules, self.seconds, self.failed, self.mine = modules, {}, [], slice(first, None, every)
        self.measure = coverage.Coverage(include=[str(ROOT / module) for module in modules], data_file=None)
        self.measure.start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = items[self.mine]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.measure.switch_context(item.nodeid)
        began = time.process_time()
        found = yield
        self.seconds[item.nodeid] = time.process_time() - began
        self.measure.switch_context("")
        return found

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def learnt(self) -> Learnt:
        self.measure.stop()
        data = self.measure.get_data()
        run_by = {module: data.contexts_by_lineno(str(ROOT / module)) for module in self.modules}
        lines = {
            module: {
                line: [test for test in tests if test and test not in self.failed] for line, tests in found.items()
            }
            for module, found in run_by.items()
        }
        _, statements, _, missed = zip(
            *(self.measure.analysis2(str(ROOT / module))[:4] for module in self.modules), strict=True
        )
        return Learnt(
            {test: seconds for test, seconds in self.seconds.items() if test not in self.failed},
            lines,
            {module: set(found) for module, found in zip(self.modules, missed, strict=True)},
            {module: len(found) for module, found in zip(self.modules, statements, strict=True)},
            {module: {line for line, tests in found.items() if "" in tests} for module, found in run_by.items()},
            self.failed,
        )


class _Chosen:
    """Some of the tests, in this order, each for at most so many seconds of processor."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.place = seconds, {test: i for i, test in enumerate(seconds)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        _end_after(LONGEST * self.seconds[nodeid] + 2)


def _end_after(seconds: float) -> None:
    """Of processor, from now on; then this process is ended."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), resource.RLIM_INFINITY))


class _InPlace:
    """Faults inside functions: the tests are read once, and in a fork of their own the faulty function takes the place
    of the real one, wherever it is known."""

    def __init__(self, faults: list[Fault], learnt: Learnt, deadline: float) -> None:
        self.faults, self.learnt, self.deadline = faults, learnt, deadline
        self.survived: list[bool] = []
        """Of every fault that was tried."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        by_name = {item.nodeid: item for item in session.items}
        self.places = {module: _Place(ROOT / module) for module in {fault.module for fault in self.faults}}
        for fault in self.faults:
            if time.monotonic() > self.deadline:
                break
            tests = [by_name[test] for test in self.learnt.tests_of(fault.module, fault.line) if test in by_name]
            code, _ = _forked(lambda tests=tests, fault=fault: self._shown(fault, tests))
            self.survived.append(not _noticed(code))
        return True

    def _shown(self, fault: Fault, tests: list[pytest.Item]) -> tuple[int, bytes]:
        self.places[fault.module].taken_by(fault.code)
        chosen, noticing = _Chosen({test.nodeid: self.learnt.seconds[test.nodeid] for test in tests}), _Noticing()
        for plugin in (chosen, noticing):
            tests[0].config.pluginmanager.register(plugin)
        for test, following in itertools.zip_longest(tests, tests[1:]):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if noticing.test:
                return int(pytest.ExitCode.TESTS_FAILED), b""
        return 0, b""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _is_at_once(code: CodeType) -> bool:
    """A comprehension, which runs where it stands."""
    return code.co_name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


def only_in_functions(fault: Fault) -> bool:
    """Whether nothing that runs on import is another than it was."""
    real, faulty = (
        [code for code in _codes(compile(text, fault.module, "exec")) if not _is_function(code)]
        for text in ((ROOT / fault.module).read_text(), fault.code)
    )

    def said(code: CodeType) -> tuple:
        plain = tuple(repr(part) for part in code.co_consts if not isinstance(part, CodeType))
        at_once = tuple(said(part) for part in code.co_consts if isinstance(part, CodeType) and _is_at_once(part))
        return code.co_qualname, code.co_code, plain, code.co_names, at_once

    return [said(code) for code in real] == [said(code) for code in faulty]


class _Place:
    """The functions of a module, by whatever name they are held, and all that remembers what functions said."""

    def __init__(self, path: Path) -> None:
        self.path, everything = path, gc.get_objects()
        self.held = [
            one for one in everything if isinstance(one, FunctionType) and one.__code__.co_filename == str(path)
        ]
        self.remembering = [one for one in everything if isinstance(one, functools._lru_cache_wrapper)]

    def taken_by(self, code: str) -> None:
        real, faulty = (
            [found for found in _codes(compile(text, str(self.path), "exec")) if _is_function(found)]
            for text in (self.path.read_text(), code)
        )
        instead = {
            (old.co_qualname, old.co_firstlineno): new for old, new in zip(real, faulty, strict=True) if old != new
        }
        for function in self.held:
            place = function.__code__.co_qualname, function.__code__.co_firstlineno
            if place in instead:
                function.__code__ = instead[place]
        for one in self.remembering:
            one.cache_clear()


class _Fork:
    """Something done in a process of its own, side by side with what comes after."""

    def __init__(self, work) -> None:
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.signal(signal.SIGXCPU, signal.SIG_DFL)
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                os.close(reading)
                try:
                    code, said = work()
                except BaseException:
                    code, said = 99, traceback.format_exc().encode()
                with open(writing, "wb") as out:
                    out.write(said)
                os._exit(code)
            finally:
                os._exit(99)
        os.close(writing)
        self._reading = reading

    def ended(self) -> tuple[int, bytes]:
        """Its exit code, or minus what ended it, and what it has to say."""
        with open(self._reading, "rb") as pipe:
            said = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]), said


def _forked(work) -> tuple[int, bytes]:
    return _Fork(work).ended()


def learn(modules: list[str], tests: tuple[str, ...], jobs: int) -> Learnt | None:
    """None if the tests cannot be read."""
    well = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.TESTS_FAILED)

    def work(job: int) -> tuple[int, bytes]:
        learning = _Learning(modules, job, jobs)
        code = pytest.main([*FAST, "--maxfail=0", *tests], plugins=[learning])
        return int(code not in well), pickle.dumps(learning.learnt())

    forks = [_Fork(lambda job=job: work(job)) for job in range(jobs)]
    ended = [fork.ended() for fork in forks]
    if any(code for code, _ in ended):
        return None
    return functools.reduce(Learnt.with_others, (pickle.loads(said) for _, said in ended))


@dataclass(frozen=True)
class Tried:
    fault: Fault
    survived: bool


def tried(mine: list[Fault], learnt: Learnt, jobs: int, deadline: float) -> list[Tried]:
    """In an order that leaves out evenly what there is no time for; so many side by side."""
    mixed = random.Random(len(mine)).sample(mine, len(mine))
    inside, on_import = ([fault for fault in mixed if only_in_functions(fault) == is_so] for is_so in (True, False))
    in_place = functools.partial(_in_place, learnt=learnt, deadline=deadline)
    anew = functools.partial(_imported_anew, learnt=learnt, deadline=deadline)
    found, replaced = _side_by_side(anew, on_import, jobs), _side_by_side(in_place, inside, jobs)
    again = [one.fault for one in replaced if one.survived and one.fault.line in learnt.on_import[one.fault.module]]
    found += [*replaced, *_side_by_side(anew, again, jobs)]
    return list({one.fault: one for one in found}.values())


def _side_by_side(survived, faults: list[Fault], jobs: int) -> list[Tried]:
    """`survived` says of the first of some faults, as many as there was time for, whether they survived."""
    shares = [faults[job::jobs] for job in range(min(jobs, len(faults)))]
    forks = [_Fork(lambda share=share: (0, pickle.dumps(survived(share)))) for share in shares]
    found = []
    for share, fork in zip(shares, forks, strict=True):
        code, said = fork.ended()
        if code:
            raise SystemExit(f"the tests cannot be read: exit code {code}\n{said.decode(errors='replace')}")
        found += [Tried(*pair) for pair in zip(share, pickle.loads(said), strict=False)]
    return found


def _in_place(faults: list[Fault], learnt: Learnt, deadline: float) -> list[bool]:
    tests = {test for fault in faults for test in learnt.tests_of(fault.module, fault.line)}
    files = sorted({test.partition("::")[0] for test in tests})
    hunt = _InPlace(faults, learnt, deadline)
    if code := int(pytest.main([*FAST, "-s", *files], plugins=[hunt])):
        raise RuntimeError(f"pytest ended with {code}")
    return hunt.survived


def _imported_anew(faults: list[Fault], learnt: Learnt, deadline: float) -> list[bool]:
    in_time = itertools.takewhile(lambda _: time.monotonic() < deadline, faults)
    return [survives_import(fault, learnt) for fault in in_time]


def survives_import(fault: Fault, learnt: Learnt) -> bool:
    tests = learnt.tests_of_all()

    def work():
        _end_after(30)  # to import it
        sys.meta_path.insert(0, _Finder(fault.module, fault.code))
        for some in (tests[:QUICKEST], tests[QUICKEST:]):  # few files to read, then the others
            files = dict.fromkeys(test.partition("::")[0] for test in some)
            chosen = _Chosen({test: learnt.seconds[test] for test in some})
            if some and (code := int(pytest.main([*FAST, *files], plugins=[chosen]))):
                return code, b""
        return 0, b""

    code, _ = _forked(work)
    # a usage error: not even the tests' own set-up could be imported, which the faultless run could
    return code != pytest.ExitCode.USAGE_ERROR and not _noticed(code)


def _noticed(code: int) -> bool:
    """Tests failed, could not even be read, or never came to an end. Tests that are gone notice nothing."""
    if code == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit("pytest does not understand what it is asked for")
    return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class _Noticing:
    """Which test failed."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.test = self.test or report.nodeid


def noticed_by(named: dict[str, Any]) -> str:
    """The test that fails with this fault; nothing if none does."""
    module, source = named["module"], (ROOT / named["module"]).read_text()
    if named["old"] not in source:
        raise SystemExit(f"{NAMED.name}: {module} has no {named['old']!r} any more")

    def work():
        sys.meta_path.insert(0, _Finder(module, source.replace(named["old"], named["new"], 1)))
        noticing = _Noticing()
        code = pytest.main([*FAST, *named["tests"]], plugins=[noticing])
        return int(code), noticing.test.encode()

    code, test = _forked(work)
    return (test.decode() or "the tests cannot be read") if _noticed(code) else ""


def all_named_are_noticed(where: list[str]) -> bool:
    every = True
    for named in json.loads(NAMED.read_text()):
        if not where or any(named["module"].startswith(place.rstrip("/")) for place in where):
            test = noticed_by(named)
            every &= bool(test)
            change = " ".join(f"{named['old']}  ->  {named['new'] or 'nothing'}".split())
            print(f"  {f'noticed by {test}' if test else 'SURVIVED'}  {named['module']}  {change}", flush=True)
    return every


# ---- what came of it, kept beside


@dataclass(frozen=True)
class Row:
    module: str
    possible: int
    faults: int
    noticed: int
    alike: int
    lines: str
    text: str
    date: str


def kept() -> dict[str, Row]:
    rows = [line.strip("| \n").split(" | ") for line in COUNTED.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): Row(row[0].strip("`"), *map(int, row[1:5]), *row[5:]) for row in rows}


def keep(row: Row) -> None:
    rows = kept() if COUNTED.exists() else {}
    rows = {name: some for name, some in (rows | {row.module: row}).items() if name in TESTS}
    found = [rows[name] for name in TESTS if name in rows]
    COUNTED.write_text(
        "# Faults that the fast tests notice\n\n"
        f"Written by `make mutants`: {verdict(found)}\n\n"
        "| module | possible faults | tried | noticed | make no difference | lines run | text (git blob) | counted |\n"
        "|---|---|---|---|---|---|---|---|\n"
        + "".join(
            f"| `{r.module}` | {r.possible} | {r.faults} | {r.noticed} | {r.alike} | {r.lines} "
            f"| {r.text} | {r.date} |\n"
            for r in found
        )
    )


def left_last_time() -> dict[str, list[str]]:
    """By module, what survived."""
    return json.loads(LEFT.read_text()) if LEFT.exists() else {}


def keep_left(module: str, survivors: list[Fault]) -> None:
    left = {**left_last_time(), module: [fault.change for fault in survivors]}
    LEFT.write_text(
        json.dumps({name: left[name] for name in TESTS if left.get(name)}, indent=1, ensure_ascii=False) + "\n"
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


def as_of(module: str) -> str:
    """Which text it has, as git names it."""
    text = (ROOT / module).read_bytes()
    return hashlib.sha1(b"blob %d\0%b" % (len(text), text)).hexdigest()[:7]


def _some_of(faults: list[Fault], given: argparse.Namespace) -> list[Fault]:
    return faults[:: math.ceil(len(faults) / given.sample) if given.sample and faults else given.every]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("where", nargs="*", help="modules or folders; all, if none is named")
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth fault")
    parser.add_argument("--sample", type=int, help="at most so many faults of a module, evenly spread")
    parser.add_argument("--left", action="store_true", help="only those that survived the last time")
    parser.add_argument("--tests", nargs="*", help="instead of the module's own")
    parser.add_argument("--named", action="store_true", help="only the faults that have a name")
    parser.add_argument("--unnamed", action="store_true", help="only the others")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tried side by side")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no other fault is tried")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of tests, that a fault has to survive")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="mutants-")
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)
    for name in NOT_OURS:
        with contextlib.suppress(ImportError):  # some tests do without
            importlib.import_module(name)
    every = given.unnamed or all_named_are_noticed(given.where)
    if given.named:
        return int(not every)
    known, before, left = json.loads(EQUIVALENT.read_text()), kept() if COUNTED.exists() else {}, left_last_time()
    modules = [m for m in TESTS if not given.where or any(m.startswith(place.rstrip("/")) for place in given.where)]
    if given.left:
        modules = [m for m in modules if left.get(m) and as_of(m) == before[m].text]
    rows = []
    for tests, some in itertools.groupby(modules, lambda module: tuple(given.tests or TESTS[module])):
        together = list(some)
        if time.monotonic() > deadline:
            print(f"no time for {', '.join(together)}")
            continue
        learnt = learn(together, tests, given.jobs)
        if learnt is None:
            print(f"{' '.join(tests)}: cannot be read")
            return 2
        learnt = dataclasses.replace(learnt, patience=given.seconds)
        for test in learnt.failed:
            every = False
            print(f"  FAILS without any fault, and is left out  {test}", flush=True)
        possible = {module: list(faults(module)) for module in together}
        mine = {module: _some_of(possible[module], given) for module in together}
        if given.left:
            mine = {
                module: [fault for fault in possible[module] if fault.change in left[module]] for module in together
            }
        noticeable = {module: [fault for fault in mine[module] if not fault.alike(known)] for module in together}
        found = tried([fault for some in noticeable.values() for fault in some], learnt, given.jobs, deadline)
        for module in together:
            shown = sorted((one for one in found if one.fault.module == module), key=lambda one: one.fault.line)
            if noticeable[module] and not shown:
                print(f"no time for {module}")
                continue
            survivors = [one.fault for one in shown if one.survived]
            if given.left:  # what there was no time for is still left
                survivors = [fault for fault in noticeable[module] if Tried(fault, False) not in shown]
            for fault in survivors:
                print(f"  survived  {module}:{fault.line}  {fault.change}", flush=True)
            alike = len(mine[module]) - len(noticeable[module])
            count, noticed = alike + len(shown), len(shown) - len(survivors)
            if given.left:  # what was noticed then is noticed now: tests were added
                count, alike = before[module].faults, before[module].alike + alike
                noticed = count - alike - len(survivors)
            date = datetime.now(UTC).strftime("%Y-%m-%d")
            lines = before[module].lines if given.left and given.tests else f"{learnt.share(module):.0f}%"
            row = Row(module, len(possible[module]), count, noticed, alike, lines, as_of(module), date)
            rows.append(row)
            print(f"{module}: {verdict([row])} {row.lines} of its lines run.", flush=True)
            keep(row)
            keep_left(module, survivors)
    print(verdict(rows))
    return int(share_of(rows) < 0.95 or not every)


if __name__ == "__main__":
    sys.exit(main())
