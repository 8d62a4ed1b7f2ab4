"""A cache for the tables of a large study: the next tables are computed only for cells that changed.

It is in the user's cache folder, not in the results folder: other people may have written the results folder, and the
tables must follow from its ledger. The lines of trials.csv are copied from the last file if their hash is the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from array import array
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.results.searches import as_stored, choice_from
from orchestrator.results.winners import SearchResult
from orchestrator.study.study import Study
from trainables import files, plugins
from trainables.errors import UserError

LEAST_TRIALS = 20_000  # not saved for smaller studies, whose tables take seconds
MOST_BYTES = 1 << 30
SOURCES = Path(__file__).parents[3]
PACKAGES = ("orchestrator", "search_spaces", "trainables")


@dataclass(frozen=True)
class KnownCell:
    """A cell as it was at the last call."""

    search: SearchResult
    offset: int
    """Where its lines begin in trials.csv, in bytes."""
    length: int
    """Of these lines, in bytes."""
    sha256: str
    kinds: dict[str, list[str]]
    """The types of the values in every column of its lines, in the order of the columns."""


@dataclass
class TableMemory:
    path: Path
    stamp: str
    """Hash of everything besides the ledger that the tables depend on."""
    columns: list[str] = field(default_factory=list)
    """The columns of trials.csv."""
    cells: dict[str, KnownCell] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, study: Study) -> TableMemory | None:
        """The cache of a results folder; None without a cache folder. Empty if the study or the code has changed."""
        try:
            place = files.user_folder("XDG_CACHE_HOME", ".cache") / "tables"
        except RuntimeError:
            return None
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        code = f"{_code()} {plugins.code_hashes()}"
        stamp = hashlib.sha256(f"{code} {study.model_dump_json()}".encode()).hexdigest()
        memory = cls(place / f"{name}.json", stamp)
        try:
            found = json.loads(files.read_plain(memory.path, MOST_BYTES))
            if found["stamp"] == stamp:
                memory.columns = found["columns"]
                memory.cells = {
                    cell: KnownCell(**{**plain, "search": _from_plain(plain["search"])})
                    for cell, plain in found["cells"].items()
                }
        except (OSError, UserError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls(memory.path, stamp)  # it is damaged, or there is none
        return memory

    def save(self) -> None:
        plain = {name: {**vars(cell), "search": _as_plain(cell.search)} for name, cell in self.cells.items()}
        text = json.dumps({"stamp": self.stamp, "columns": self.columns, "cells": plain}, separators=(",", ":"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=files.PRIVATE_FOLDER)
            with files.replacing(self.path, mode=files.PRIVATE) as file:
                file.write(text.encode())
        except OSError:
            return  # the next call computes everything

    def forget(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            return


def _as_plain(search: SearchResult) -> dict[str, Any]:
    return {
        **{field.name: getattr(search, field.name) for field in fields(search)},
        "choice": as_stored(search.choice),
        "seconds": base64.b64encode(array("d", search.seconds)).decode(),
    }


def _from_plain(plain: dict[str, Any]) -> SearchResult:
    """Raises an error if the cached values are damaged."""
    axes = {stage: {name: tuple(values) for name, values in axes.items()} for stage, axes in plain["axes"].items()}
    return SearchResult(
        choice=choice_from(plain["choice"]),
        chosen=plain["chosen"],
        by_one_seed=plain["by_one_seed"],
        found_in=tuple(plain["found_in"]),
        configurations=plain["configurations"],
        trials=plain["trials"],
        trial_rounds=plain["trial_rounds"],
        states=Counter(plain["states"]),
        axes=axes,
        seconds=tuple(array("d", base64.b64decode(plain["seconds"]))),
        missing=plain["missing"],
        more_to_come=plain["more_to_come"],
        digest=plain["digest"],
        worst_epsilon=plain["worst_epsilon"],
    )


@cache
def _code() -> str:
    """A hash that changes whenever a source file does."""
    sources = sorted(path for package in PACKAGES for path in (SOURCES / package).rglob("*.py"))
    stats = [(str(path), status.st_size, status.st_mtime_ns) for path in sources if (status := path.stat())]
    return hashlib.sha256(repr(stats).encode()).hexdigest()
