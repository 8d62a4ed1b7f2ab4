"""Small deliberate faults, one at a time, and whether the fast tests notice: `make mutants`.

cosmic-ray makes the faults. Its own way to run them starts Python anew for each, which takes longer than the tests:
instead everything that is not ours is imported once, and every fault lives and dies in a fork, where an import hook
gives the faulty module out in place of the real one. No file is touched. A fault that makes a program go on for ever is
stopped by the seconds of processor it has used, in units of what the faultless run took: how loaded a machine is does
not matter.

    python tests/mutants.py                           all modules
    python tests/mutants.py trainables/privacy        what lies there
    python tests/mutants.py --every 10                a tenth of the faults

Survivors that nothing could tell from the real thing are listed, with a reason each, in `mutants_equivalent.json`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
ALL_OF_THEM = ("tests/test_methods.py", "tests/test_observed_releases.py", "tests/test_goldens.py")
TESTS: dict[str, tuple[str, ...]] = {
    "trainables/privacy/gaussian.py": ("tests/test_privacy.py",),
    "trainables/privacy/noise.py": ("tests/test_noise.py",),
    "trainables/privacy/plan.py": (
        "tests/test_privacy.py",
        "tests/test_sampling.py",
        "tests/test_observed_releases.py",
    ),
    "trainables/privacy/sampled.py": ("tests/test_sampling.py",),
    "trainables/data/partition.py": ("tests/test_partition.py", "tests/test_goldens.py"),
    "orchestrator/results/ledger.py": ("tests/test_ledger.py",),
    "orchestrator/search/selection.py": ("tests/test_search.py", "tests/test_tables.py"),
    "orchestrator/search/sweep.py": ("tests/test_search.py",),
    "orchestrator/search/cell_search.py": ("tests/test_search.py",),
    **dict.fromkeys(
        (str(path.relative_to(ROOT)) for path in sorted((ROOT / "trainables" / "methods").glob("[a-z]*.py"))),
        (
            "tests/test_user_level.py",
            "tests/test_fednew.py",
            "tests/test_glm.py",
            "tests/test_sampling.py",
            *ALL_OF_THEM,
        ),
    ),
    **dict.fromkeys(
        (str(path.relative_to(ROOT)) for path in sorted((ROOT / "orchestrator/report/tables").glob("[a-z]*.py"))),
        ("tests/test_tables.py",),
    ),
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


def in_a_fork(module: str, code: str, tests: tuple[str, ...], seconds: float | None = None) -> tuple[bool, float]:
    """Whether the tests pass, and the seconds of processor that took."""
    child = os.fork()
    if child == 0:
        try:
            if seconds is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            sys.meta_path.insert(0, _Finder(module, code))
            import pytest

            os._exit(int(pytest.main([*FAST, *tests])))
        finally:
            os._exit(99)
    _, status, used = os.wait4(child, 0)
    return status == 0, used.ru_utime + used.ru_stime


def covered(module: str, tests: tuple[str, ...]) -> float:
    """The share of the module's lines that its tests run, in percent."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import coverage
        import pytest

        measure = coverage.Coverage(include=[str(ROOT / module)], data_file=None)
        measure.start()
        pytest.main([*FAST, *tests])
        measure.stop()
        share = measure.report(file=io.StringIO())
        os.write(writing, f"{share:.1f}".encode())
        os._exit(0)
    os.close(writing)
    os.wait4(child, 0)
    return float(os.read(reading, 100) or "nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("where", nargs="*", help="modules or folders; all, if none is named")
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth fault")
    parser.add_argument("--tests", nargs="*", help="instead of the module's own")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in NOT_OURS:
        importlib.import_module(name)
    known = json.loads(EQUIVALENT.read_text())
    modules = [m for m in TESTS if not given.where or any(m.startswith(place.rstrip("/")) for place in given.where)]
    total = killed = equivalent = 0
    for module in modules:
        tests = tuple(given.tests or TESTS[module])
        right, seconds = in_a_fork(module, (ROOT / module).read_text(), tests)
        if not right:
            print(f"{module}: its tests fail without any fault")
            return 2
        mine = list(faults(module))[:: given.every]
        noticed = 0
        for fault in mine:
            passes, _ = in_a_fork(module, fault.code, tests, LONGEST * seconds + 5)
            noticed += not passes
            if passes and fault.name in known:
                equivalent += 1
            elif passes:
                print(f"  survived  {module}:{fault.line}  {fault.change}", flush=True)
        total, killed = total + len(mine), killed + noticed
        share = covered(module, tests)
        print(f"{module}: {noticed} of {len(mine)} noticed; {share:.0f}% of its lines run", flush=True)
    left = total - killed - equivalent
    noticeable = total - equivalent
    print(
        f"{killed} of {noticeable} faults noticed ({100 * killed / max(1, noticeable):.1f}%), {left} survived, "
        f"{equivalent} more make no difference"
    )
    return int(killed < 0.95 * noticeable)


if __name__ == "__main__":
    sys.exit(main())
