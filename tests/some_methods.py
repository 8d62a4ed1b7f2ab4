"""Tests of every method that take long: `make test` runs them for some methods, `make audits` for the others."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

SOME = ("dp-fedgd", "dp-fedsofim", "dp-fedavg", "dp-ftrl", "dp-fedadamw")


def marks_of(method: str) -> list[pytest.MarkDecorator]:
    return [] if method in SOME else [pytest.mark.audits]


def with_marks(cases: Iterable[Sequence[Any] | str]) -> list[Any]:
    """The cases of a test, each a method or a tuple that begins with one."""
    tuples = [(case,) if isinstance(case, str) else tuple(case) for case in cases]
    return [pytest.param(*case, marks=marks_of(case[0])) for case in tuples]
