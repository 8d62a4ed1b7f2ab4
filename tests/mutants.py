"""Mutation testing: small deliberate faults (mutants), one at a time, and whether the fast tests fail: `make mutants`.

cosmic-ray makes the mutants. Its own runner starts Python for each, which takes longer than the tests. Here the tests
are collected once, and every mutant runs in a fork, where the mutated function replaces the real one. Code that runs on
import is imported again in the fork, through an import hook that serves the mutated module. No file is changed.

A baseline run without a mutant records which lines each test runs. A mutant is run against the tests that run its line,
fastest first. If it survives there, and its line also runs during imports, it is run again by importing. A mutant that
never ends is stopped by the CPU time it used, as a multiple of the baseline's: the load of the machine does not matter.

    python tests/mutants.py                           all modules
    python tests/mutants.py trainables/privacy        one folder
    python tests/mutants.py --every 10                a tenth of the mutants
    python tests/mutants.py --sample 20               at most twenty per module
    python tests/mutants.py --survivors               those that survived last time; faster with `--tests` and the files
                                                      that hold the new tests
    python tests/mutants.py --named                   the mutants of `mutants_named.json`
    python tests/mutants.py --stale                   entries of the JSON files whose source line is gone; runs nothing
    python tests/mutants.py --jobs 12 --minutes 8     twelve at a time; what does not fit is left out evenly
    python tests/mutants.py --seconds 30              at most 30 s of tests per mutant

`mutants_equivalent.json` lists mutants that no test could detect, each with a reason; they are not run. `mutants.md`
holds the counts and the line coverage, `mutants_survived.json` the survivors. `mutants_named.json` lists faults that
were once undetected, with the tests that detect them now; they run first, and each must be detected.
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
import io
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
import tokenize
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
COUNTS = Path(__file__).with_name("mutants.md")
SURVIVED = Path(__file__).with_name("mutants_survived.json")
METHOD_TESTS = tuple(
    f"tests/test_{name}.py"
    for name in (
        *("methods", "goldens", "observed_releases", "adaptive_clipping", "banded", "fednew", "sampling", "user_level"),
        *("secret_participation", "glm", "privacy", "tree", "mlp"),
    )
)
SEARCH_TESTS = ("tests/test_search.py", "tests/test_search_details.py", "tests/test_private_search.py")
TABLE_TESTS = ("tests/test_tables.py", "tests/test_table_details.py", "tests/test_table_snapshots.py")


def _each_file(folder: str, tests: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {str(path.relative_to(ROOT)): tests for path in sorted((ROOT / folder).rglob("*.py")) if path.read_text()}


TESTS: dict[str, tuple[str, ...]] = {
    **_each_file("trainables/privacy", ("tests/test_privacy.py",)),
    "trainables/privacy/noise.py": ("tests/test_noise.py", "tests/test_goldens.py"),
    "trainables/privacy/plan.py": ("tests/test_privacy.py", "tests/test_sampling.py"),
    "trainables/privacy/sampled.py": ("tests/test_sampling.py",),
    "trainables/privacy/lengths.py": ("tests/test_scaled_features.py", "tests/test_preprocess.py"),
    "trainables/privacy/noisy_means.py": ("tests/test_noisy_means.py", "tests/test_preprocess.py"),
    "trainables/privacy/participation.py": (
        "tests/test_sampling.py",
        "tests/test_secret_participation.py",
        "tests/test_goldens.py",
    ),
    "trainables/privacy/publication.py": ("tests/test_privacy.py", "tests/test_account.py"),
    "trainables/privacy/shares.py": ("tests/test_privacy.py", "tests/test_adaptive_defaults.py"),
    "trainables/privacy/private_selection.py": (
        "tests/test_selection.py",
        "tests/test_private_search.py",
        "tests/test_account.py",
    ),
    "trainables/data/partition.py": ("tests/test_partition.py", "tests/test_goldens.py"),
    "orchestrator/results/ledger.py": ("tests/test_ledger.py",),
    **_each_file("orchestrator/search", SEARCH_TESTS),
    "orchestrator/execution/sweep.py": SEARCH_TESTS,
    **_each_file("trainables/methods", METHOD_TESTS),
    "trainables/methods/__init__.py": ("tests/test_plugins.py",),
    **_each_file("orchestrator/report/tables", TABLE_TESTS),
    "orchestrator/results/frames.py": TABLE_TESTS,
    "orchestrator/results/winners.py": TABLE_TESTS,
}
"""The tests that should detect a mutant of a module; tests that start Ray are left out."""
del TESTS["trainables/privacy/noise_triton.py"]  # runs on GPUs only: `pytest -k cuda tests/test_noise.py`
PYTEST_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not chaos and not nodes")
PRELOADED = (
    *("numpy", "scipy.stats", "torch", "pandas", "ray", "optuna", "dp_accounting", "hypothesis", "pydantic", "yaml"),
    *("typer", "mpmath", "markdown_it"),
)
"""Libraries that are imported once, before any fork."""
SWAPS = (
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
        for pair in SWAPS
        for one, other in (pair, pair[::-1])
        for kind in (("Binary",) if pair[0] in ("Add", "Mul") else ("Comparison",))
    ),
)
ARROW = "  ->  "
EVERYWHERE = "everywhere: "
"""Prefix of an entry of `mutants_equivalent.json` for a line of any module."""
WITHIN = "everywhere, within a line: "
"""Prefix of an entry of `mutants_equivalent.json` for a part of a line of any module."""
FIRST_TESTS = 5
"""The number of tests that an imported mutant is run against first, before all test files are collected."""
CPU_FACTOR = 10
"""A test may use this many times the CPU seconds of its baseline run."""


@dataclass(frozen=True)
class Mutant:
    module: str
    code: str
    line: int
    change: str
    """`old line  ->  new line`, without comments."""

    def is_equivalent(self, listed: dict[str, str]) -> bool:
        if f"{self.module}: {self.change}" in listed or f"{EVERYWHERE}{self.change}" in listed:
            return True
        return any(self._swaps(*rule.removeprefix(WITHIN).split(ARROW)) for rule in listed if rule.startswith(WITHIN))

    def _swaps(self, part: str, other: str) -> bool:
        """Whether the change replaces one occurrence of `part` by `other`, and nothing else."""
        old, _, new = self.change.partition(ARROW)
        pieces = old.split(part)
        return any(part.join(pieces[:n]) + other + part.join(pieces[n:]) == new for n in range(1, len(pieces)))


def mutants_of(module: str) -> Iterator[Mutant]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source, known = (ROOT / module).read_text(), set()
    for name in (name for name in OPERATORS if name in set(operator_names())):
        occurrence = 0
        while (code := mutate_code(source, get_operator(name)(), occurrence)) is not None:
            occurrence += 1
            if code not in known and code != source and _compiles(code) and _changes_operation(name, source, code):
                known.add(code)
                yield _described(module, source, code)


def _compiles(code: str) -> bool:
    """False where cosmic-ray replaced the `**` of keyword arguments by a product."""
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _changes_operation(name: str, source: str, code: str) -> bool:
    """False where cosmic-ray replaced the `*` among parameters by a `/`."""

    def operations(text: str) -> list[str]:
        return [
            type(node.op).__name__ for node in ast.walk(ast.parse(text)) if isinstance(node, ast.BinOp | ast.AugAssign)
        ]

    return "BinaryOperator" not in name or operations(source) != operations(code)


def _described(module: str, source: str, code: str) -> Mutant:
    before, after = lines_without_comments(source), lines_without_comments(code)
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            old, new = (" ".join(line.strip() for line in lines) for lines in (before[i:i_end], after[j:j_end]))
            return Mutant(module, code, i + 1, f"{old}{ARROW}{new}")
    raise AssertionError("the mutant equals the module")


def lines_without_comments(source: str) -> list[str]:
    """So that a reworded comment leaves the entries of `mutants_equivalent.json` valid."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return lines


class _MutantLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: str) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str):
        return compile(self._code, self.path, "exec")


class _MutantFinder:
    """An import hook that serves the mutated module."""

    def __init__(self, module: str, code: str) -> None:
        self.name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.path = str(ROOT / module)
        self.code = code

    def find_spec(self, name: str, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=_MutantLoader(name, self.path, self.code))


@dataclass(frozen=True)
class Baseline:
    """What a run of some tests without a mutant recorded."""

    seconds: dict[str, float]
    """By test, CPU seconds."""
    tests_by_line: dict[str, dict[int, list[str]]]
    """By module and line, the tests that run it."""
    missed: dict[str, set[int]]
    """By module, the lines that no test runs."""
    statements: dict[str, int]
    """By module, the number of statements."""
    on_import: dict[str, set[int]]
    """By module, the lines that run outside any test, while modules or tests are imported."""
    failed: list[str]
    """Tests that fail without a mutant, and cannot detect one."""
    limit: float = math.inf
    """Seconds of tests per mutant, fastest tests first."""

    def coverage(self, module: str) -> float:
        """Percent of a module's statements that the tests run."""
        return 100 * (1 - len(self.missed[module]) / max(1, self.statements[module]))

    def merge(self, other: Baseline) -> Baseline:
        """Of two runs of different tests."""
        tests_by_line = {
            module: {line: [*mine.get(line, ()), *theirs.get(line, ())] for line in {**mine, **theirs}}
            for module, mine, theirs in ((m, self.tests_by_line[m], other.tests_by_line[m]) for m in self.tests_by_line)
        }
        missed = {module: self.missed[module] & other.missed[module] for module in self.missed}
        on_import = {module: self.on_import[module] | other.on_import[module] for module in self.on_import}
        failed = self.failed + other.failed
        return Baseline({**self.seconds, **other.seconds}, tests_by_line, missed, self.statements, on_import, failed)

    def tests_of(self, module: str, line: int) -> list[str]:
        """The tests that run the line, fastest first."""
        return self._fastest_first(self.tests_by_line[module].get(line, ())) or self.all_tests()

    def all_tests(self) -> list[str]:
        """Also tests that run no line of the module: they may use what it defines on import."""
        return self._fastest_first(self.seconds)

    def _fastest_first(self, tests: Iterable[str]) -> list[str]:
        ordered = sorted(tests, key=lambda test: self.seconds[test])
        elapsed = itertools.accumulate(self.seconds[test] for test in ordered)
        return [test for test, seconds in zip(ordered, elapsed, strict=True) if seconds <= self.limit] or ordered[:1]


class _BaselineRun:
    """Pytest plugin: records which lines every test runs and how long it takes, for every `every`-th test."""

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
        result = yield
        self.seconds[item.nodeid] = time.process_time() - began
        self.measure.switch_context("")
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def baseline(self) -> Baseline:
        self.measure.stop()
        data = self.measure.get_data()
        contexts = {module: data.contexts_by_lineno(str(ROOT / module)) for module in self.modules}
        tests_by_line = {
            module: {
                line: [test for test in tests if test and test not in self.failed] for line, tests in by_line.items()
            }
            for module, by_line in contexts.items()
        }
        _, statements, _, missed = zip(
            *(self.measure.analysis2(str(ROOT / module))[:4] for module in self.modules), strict=True
        )
        return Baseline(
            {test: seconds for test, seconds in self.seconds.items() if test not in self.failed},
            tests_by_line,
            {module: set(lines) for module, lines in zip(self.modules, missed, strict=True)},
            {module: len(lines) for module, lines in zip(self.modules, statements, strict=True)},
            {module: {line for line, tests in by_line.items() if "" in tests} for module, by_line in contexts.items()},
            self.failed,
        )


class _SelectedTests:
    """Pytest plugin: only these tests, in this order, each with a limit on its CPU seconds."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.position = seconds, {test: i for i, test in enumerate(seconds)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.position), key=lambda item: self.position[item.nodeid]
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        _limit_cpu(CPU_FACTOR * self.seconds[nodeid] + 2)


def _limit_cpu(seconds: float) -> None:
    """The kernel ends this process once it has used this many more CPU seconds."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), resource.RLIM_INFINITY))


class _PatchedRuns:
    """Pytest plugin for mutants inside functions: tests are collected once, and each mutant's function replaces the
    real one in a fork."""

    def __init__(self, mutants: list[Mutant], baseline: Baseline, deadline: float) -> None:
        self.mutants, self.baseline, self.deadline = mutants, baseline, deadline
        self.survived: list[bool] = []
        """For each mutant that was run."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        by_name = {item.nodeid: item for item in session.items}
        self.functions = {module: _Functions(ROOT / module) for module in {mutant.module for mutant in self.mutants}}
        for mutant in self.mutants:
            if time.monotonic() > self.deadline:
                break
            tests = [by_name[test] for test in self.baseline.tests_of(mutant.module, mutant.line) if test in by_name]
            code, _ = _forked(lambda tests=tests, mutant=mutant: self._run(mutant, tests))
            self.survived.append(not _is_detected(code))
        return True

    def _run(self, mutant: Mutant, tests: list[pytest.Item]) -> tuple[int, bytes]:
        self.functions[mutant.module].replace_with(mutant.code)
        seconds = {test.nodeid: self.baseline.seconds[test.nodeid] for test in tests}
        selected, failures = _SelectedTests(seconds), _Failures()
        for plugin in (selected, failures):
            tests[0].config.pluginmanager.register(plugin)
        for test, following in itertools.zip_longest(tests, tests[1:]):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if failures.tests:
                return int(pytest.ExitCode.TESTS_FAILED), b""
        return 0, b""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _is_comprehension(code: CodeType) -> bool:
    return code.co_name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


def only_in_functions(mutant: Mutant) -> bool:
    """Whether the code that runs on import is unchanged."""
    real, mutated = (
        [code for code in _codes(compile(text, mutant.module, "exec")) if not _is_function(code)]
        for text in ((ROOT / mutant.module).read_text(), mutant.code)
    )

    def content(code: CodeType) -> tuple:
        plain = tuple(repr(part) for part in code.co_consts if not isinstance(part, CodeType))
        nested = (part for part in code.co_consts if isinstance(part, CodeType) and _is_comprehension(part))
        return code.co_qualname, code.co_code, plain, code.co_names, tuple(map(content, nested))

    return [content(code) for code in real] == [content(code) for code in mutated]


class _Functions:
    """All function objects of a module, and all caches."""

    def __init__(self, path: Path) -> None:
        self.path, objects = path, gc.get_objects()
        self.functions = [
            one for one in objects if isinstance(one, FunctionType) and one.__code__.co_filename == str(path)
        ]
        self.caches = [one for one in objects if isinstance(one, functools._lru_cache_wrapper)]

    def replace_with(self, code: str) -> None:
        real, mutated = (
            [part for part in _codes(compile(text, str(self.path), "exec")) if _is_function(part)]
            for text in (self.path.read_text(), code)
        )
        replacements = {
            (old.co_qualname, old.co_firstlineno): new for old, new in zip(real, mutated, strict=True) if old != new
        }
        for function in self.functions:
            position = function.__code__.co_qualname, function.__code__.co_firstlineno
            if position in replacements:
                function.__code__ = replacements[position]
        for cache in self.caches:
            cache.cache_clear()


class _Fork:
    """Runs a function in a child process, concurrently with this one."""

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
                    code, output = work()
                except BaseException:
                    code, output = 99, traceback.format_exc().encode()
                with open(writing, "wb") as out:
                    out.write(output)
                os._exit(code)
            finally:
                os._exit(99)
        os.close(writing)
        self._reading = reading

    def result(self) -> tuple[int, bytes]:
        """The exit code, or minus the signal that ended it, and the output."""
        with open(self._reading, "rb") as pipe:
            output = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]), output


def _forked(work) -> tuple[int, bytes]:
    return _Fork(work).result()


def run_baseline(modules: list[str], tests: tuple[str, ...], jobs: int) -> Baseline | None:
    """None if the tests cannot be collected."""
    accepted = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.TESTS_FAILED)

    def work(job: int) -> tuple[int, bytes]:
        run = _BaselineRun(modules, job, jobs)
        code = pytest.main([*PYTEST_OPTIONS, "--maxfail=0", *tests], plugins=[run])
        return int(code not in accepted), pickle.dumps(run.baseline())

    forks = [_Fork(lambda job=job: work(job)) for job in range(jobs)]
    results = [fork.result() for fork in forks]
    if any(code for code, _ in results):
        return None
    return functools.reduce(Baseline.merge, (pickle.loads(output) for _, output in results))


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    survived: bool


def run_mutants(mutants: list[Mutant], baseline: Baseline, jobs: int, deadline: float) -> list[Verdict]:
    """In random order, so that the deadline leaves mutants out evenly."""
    shuffled = random.Random(len(mutants)).sample(mutants, len(mutants))
    inside, on_import = ([m for m in shuffled if only_in_functions(m) == expected] for expected in (True, False))
    patched = functools.partial(_run_patched, baseline=baseline, deadline=deadline)
    imported = functools.partial(_run_imported, baseline=baseline, deadline=deadline)
    verdicts, from_patched = _in_parallel(imported, on_import, jobs), _in_parallel(patched, inside, jobs)
    again = [v.mutant for v in from_patched if v.survived and v.mutant.line in baseline.on_import[v.mutant.module]]
    verdicts += [*from_patched, *_in_parallel(imported, again, jobs)]
    return list({verdict.mutant: verdict for verdict in verdicts}.values())


def _in_parallel(survived, mutants: list[Mutant], jobs: int) -> list[Verdict]:
    """`survived` returns, for as many of the first mutants as there was time for, whether they survived."""
    shares = [mutants[job::jobs] for job in range(min(jobs, len(mutants)))]
    forks = [_Fork(lambda share=share: (0, pickle.dumps(survived(share)))) for share in shares]
    verdicts = []
    for share, fork in zip(shares, forks, strict=True):
        code, output = fork.result()
        if code:
            raise SystemExit(f"the tests cannot be collected: exit code {code}\n{output.decode(errors='replace')}")
        verdicts += [Verdict(*pair) for pair in zip(share, pickle.loads(output), strict=False)]
    return verdicts


def _run_patched(mutants: list[Mutant], baseline: Baseline, deadline: float) -> list[bool]:
    tests = {test for mutant in mutants for test in baseline.tests_of(mutant.module, mutant.line)}
    files = sorted({test.partition("::")[0] for test in tests})
    runs = _PatchedRuns(mutants, baseline, deadline)
    if code := int(pytest.main([*PYTEST_OPTIONS, "-s", *files], plugins=[runs])):
        raise RuntimeError(f"pytest ended with {code}")
    return runs.survived


def _run_imported(mutants: list[Mutant], baseline: Baseline, deadline: float) -> list[bool]:
    in_time = itertools.takewhile(lambda _: time.monotonic() < deadline, mutants)
    return [survives_import(mutant, baseline) for mutant in in_time]


def survives_import(mutant: Mutant, baseline: Baseline) -> bool:
    tests = baseline.all_tests()

    def work():
        _limit_cpu(30)  # for the import
        sys.meta_path.insert(0, _MutantFinder(mutant.module, mutant.code))
        for batch in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
            files = dict.fromkeys(test.partition("::")[0] for test in batch)
            selected = _SelectedTests({test: baseline.seconds[test] for test in batch})
            if batch and (code := int(pytest.main([*PYTEST_OPTIONS, *files], plugins=[selected]))):
                return code, b""
        return 0, b""

    code, _ = _forked(work)
    # a usage error means that conftest.py could not be imported: without the mutant it could
    return code != pytest.ExitCode.USAGE_ERROR and not _is_detected(code)


def _is_detected(code: int) -> bool:
    """Tests failed, could not be collected, or did not end. An empty selection of tests detects nothing."""
    if code == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit("pytest does not accept its arguments")
    return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class _Failures:
    """Pytest plugin: the tests that failed."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tests.append(report.nodeid)


# ---- named mutants


def detected_by(named: dict[str, Any]) -> str:
    """A test that fails with this mutant and passes without; empty if there is none."""
    source = (ROOT / named["module"]).read_text()
    mutated = _MutantFinder(named["module"], source.replace(named["old"], named["new"], 1))
    passing_only = [f"--deselect={test}" for test in _failures(tuple(named["tests"]))]
    failures = _failures((*named["tests"], "-x", *passing_only), mutated)
    return failures[0] if failures else ""


@functools.cache
def _failures(arguments: tuple[str, ...], mutated: _MutantFinder | None = None) -> list[str]:
    """The tests that fail, with a mutant or without."""

    def work():
        if mutated is not None:
            sys.meta_path.insert(0, mutated)
        failures = _Failures()
        code = pytest.main([*PYTEST_OPTIONS, "--maxfail=0", *arguments], plugins=[failures])
        return int(code), json.dumps(failures.tests).encode()

    code, output = _forked(work)
    if not _is_detected(code):
        return []
    tests = json.loads(output) if code == pytest.ExitCode.TESTS_FAILED else []
    if mutated is None and not tests:
        raise SystemExit(f"{' '.join(arguments)}: pytest ended with {code} without a mutant")
    return tests or ["the tests cannot be collected"]


def run_named(where: list[str]) -> bool:
    """Whether every named mutant is detected."""
    all_detected = True
    for named in json.loads(NAMED.read_text()):
        if not where or any(named["module"].startswith(prefix.rstrip("/")) for prefix in where):
            test = detected_by(named)
            all_detected &= bool(test)
            change = " ".join(f"{named['old']}{ARROW}{named['new'] or 'nothing'}".split())
            print(f"  {f'detected by {test}' if test else 'SURVIVED'}  {named['module']}  {change}", flush=True)
    return all_detected


def stale_entries() -> list[str]:
    """Entries of the JSON files whose module or source line no longer exists."""

    @functools.cache
    def source(module: str) -> str:
        """The lines without comments and indentation, joined by spaces."""
        path = ROOT / module
        return " ".join(line.strip() for line in lines_without_comments(path.read_text())) if path.exists() else ""

    stale = []
    for named in json.loads(NAMED.read_text()):
        path = ROOT / named["module"]
        if not path.exists() or named["old"] not in path.read_text():
            stale.append(f"{NAMED.name}: {named['module']}: {named['old']}")
        stale += [f"{NAMED.name}: {test}" for test in named["tests"] if "/" in test and not (ROOT / test).exists()]
    for entry in json.loads(EQUIVALENT.read_text()):
        module, _, change = entry.partition(": ")
        old = change.partition(ARROW)[0]
        if module.startswith("everywhere"):
            gone = not any(old in source(one) for one in TESTS)
        else:
            gone = module not in TESTS or old not in source(module)
        if gone:
            stale.append(f"{EQUIVALENT.name}: {entry}")
    for module, changes in read_survivors().items():
        stale += [f"{SURVIVED.name}: {module}: {c}" for c in changes if c.partition(ARROW)[0] not in source(module)]
    stale += [f"{COUNTS.name}: {module}" for module in read_counts() if module not in TESTS]
    return stale


# ---- counts


@dataclass(frozen=True)
class Row:
    module: str
    possible: int
    run: int
    detected: int
    equivalent: int
    lines: str
    text: str
    date: str


def read_counts() -> dict[str, Row]:
    rows = [line.strip("| \n").split(" | ") for line in COUNTS.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): Row(row[0].strip("`"), *map(int, row[1:5]), *row[5:]) for row in rows}


def write_counts(rows: Iterable[Row]) -> None:
    by_module = {row.module: row for row in rows}
    ordered = [by_module[module] for module in TESTS if module in by_module]
    COUNTS.write_text(
        "# Mutants that the fast tests detect\n\n"
        f"Written by `make mutants`: {summary(ordered)}\n\n"
        "| module | possible | run | detected | equivalent | lines covered | source (git blob) | date |\n"
        "|---|---|---|---|---|---|---|---|\n"
        + "".join(
            f"| `{r.module}` | {r.possible} | {r.run} | {r.detected} | {r.equivalent} | {r.lines} "
            f"| {r.text} | {r.date} |\n"
            for r in ordered
        )
    )


def read_survivors() -> dict[str, list[str]]:
    """By module, the changes of the mutants that survived."""
    return json.loads(SURVIVED.read_text()) if SURVIVED.exists() else {}


def write_survivors(survivors: dict[str, list[str]]) -> None:
    kept = {module: survivors[module] for module in TESTS if survivors.get(module)}
    SURVIVED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def detected_share(rows: list[Row]) -> float:
    return sum(r.detected for r in rows) / max(1, sum(r.run - r.equivalent for r in rows))


def summary(rows: list[Row]) -> str:
    detected, equivalent = sum(r.detected for r in rows), sum(r.equivalent for r in rows)
    detectable = sum(r.run for r in rows) - equivalent
    return (
        f"{detected} of {detectable} mutants detected ({100 * detected_share(rows):.1f}%), "
        f"{detectable - detected} survived, {equivalent} more are equivalent."
    )


def blob_of(module: str) -> str:
    """The hash that git gives the module's source."""
    text = (ROOT / module).read_bytes()
    return hashlib.sha1(b"blob %d\0%b" % (len(text), text)).hexdigest()[:7]


def _subset(mutants: list[Mutant], given: argparse.Namespace) -> list[Mutant]:
    return mutants[:: math.ceil(len(mutants) / given.sample) if given.sample and mutants else given.every]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("where", nargs="*", help="modules or folders (default: all)")
    parser.add_argument("--every", type=int, default=1, help="run every n-th mutant")
    parser.add_argument("--sample", type=int, help="at most this many mutants per module, evenly spread")
    parser.add_argument("--survivors", action="store_true", help="only those that survived last time")
    parser.add_argument("--tests", nargs="*", help="instead of the module's own")
    parser.add_argument("--named", action="store_true", help="only the named mutants")
    parser.add_argument("--unnamed", action="store_true", help="without the named mutants")
    parser.add_argument("--stale", action="store_true", help="list entries whose source line is gone, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run in parallel")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no mutant after this time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="seconds of tests per mutant")
    given = parser.parse_args()
    if stale := stale_entries():
        print("\n".join(f"stale: {entry}" for entry in stale))
    if given.stale:
        return int(bool(stale))
    deadline = time.monotonic() + 60 * given.minutes
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="mutants-")
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # optional for some tests
            importlib.import_module(name)
    succeeded = given.unnamed or run_named(given.where)
    if given.named:
        return int(not succeeded)
    listed, before, survivors_before = json.loads(EQUIVALENT.read_text()), read_counts(), read_survivors()
    modules = [m for m in TESTS if not given.where or any(m.startswith(prefix.rstrip("/")) for prefix in given.where)]
    if given.survivors:
        modules = [m for m in modules if survivors_before.get(m) and blob_of(m) == before[m].text]
    rows = []
    for tests, group in itertools.groupby(modules, lambda module: tuple(given.tests or TESTS[module])):
        together = list(group)
        if time.monotonic() > deadline:
            print(f"no time for {', '.join(together)}")
            continue
        baseline = run_baseline(together, tests, given.jobs)
        if baseline is None:
            print(f"{' '.join(tests)}: cannot be collected")
            return 2
        baseline = dataclasses.replace(baseline, limit=given.seconds)
        for test in baseline.failed:
            succeeded = False
            print(f"  FAILS without a mutant, and is left out  {test}", flush=True)
        possible = {module: list(mutants_of(module)) for module in together}
        chosen = {module: _subset(possible[module], given) for module in together}
        if given.survivors:
            chosen = {m: [mutant for mutant in possible[m] if mutant.change in survivors_before[m]] for m in together}
        detectable = {m: [mutant for mutant in chosen[m] if not mutant.is_equivalent(listed)] for m in together}
        verdicts = run_mutants(list(itertools.chain(*detectable.values())), baseline, given.jobs, deadline)
        for module in together:
            own = sorted((v for v in verdicts if v.mutant.module == module), key=lambda v: v.mutant.line)
            if detectable[module] and not own:
                print(f"no time for {module}")
                continue
            survivors = [verdict.mutant for verdict in own if verdict.survived]
            if given.survivors:  # those that there was no time for remain survivors
                survivors = [mutant for mutant in detectable[module] if Verdict(mutant, False) not in own]
            for mutant in survivors:
                print(f"  survived  {module}:{mutant.line}  {mutant.change}", flush=True)
            equivalent = len(chosen[module]) - len(detectable[module])
            count, detected = equivalent + len(own), len(own) - len(survivors)
            if given.survivors:  # tests were only added: what was detected before still is
                count, equivalent = before[module].run, before[module].equivalent + equivalent
                detected = count - equivalent - len(survivors)
            date = datetime.now(UTC).strftime("%Y-%m-%d")
            lines = before[module].lines if given.survivors and given.tests else f"{baseline.coverage(module):.0f}%"
            row = Row(module, len(possible[module]), count, detected, equivalent, lines, blob_of(module), date)
            rows.append(row)
            print(f"{module}: {summary([row])} {row.lines} of its lines are covered.", flush=True)
            write_counts([*read_counts().values(), row])
            write_survivors({**read_survivors(), module: [mutant.change for mutant in survivors]})
    print(summary(rows))
    return int(detected_share(rows) < 0.95 or not succeeded)


if __name__ == "__main__":
    sys.exit(main())
