"""The numbers that the papers publish."""

import contextlib
import csv
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

FEDSOFIM, FEDNEW, HEART = "DP-FedSOFIM", "DP-FedNew", "heart disease"
"""Sources of published numbers: two papers, named after the methods they propose, and results for heart disease."""
CITATION = "arXiv:2601.09166"
"""The DP-FedSOFIM paper."""
SOURCES = {
    FEDSOFIM: "the DP-FedSOFIM paper",
    FEDNEW: "the DP-FedNew paper",
    HEART: "results published for heart disease",
}


@cache
def published(name: str) -> tuple[Any, ...]:
    """The rows of a file in paper_numbers: columns are attributes, converted to numbers where possible."""
    file = resources.files(__package__) / "paper_numbers" / f"{name}.csv"
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return tuple(SimpleNamespace(**{key: _value(text) for key, text in row.items()}) for row in rows)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def table_name(paper: str, number: int) -> str:
    return f"Table {number} of {SOURCES[paper]}" if number else SOURCES[paper].capitalize()


def file_stem(paper: str, number: int) -> str:
    return f"{paper.lower().replace(' ', '-')}{f'-table-{number}' if number else ''}"
