"""Reads SVMlight files (LIBSVM's format): `LABEL [qid:ID] INDEX:VALUE ... [# comment]`, sparse, indices ascending."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError

MOST_BYTES = 8 << 30  # of the table with its zeros


def first_index(lines: Iterable[str]) -> int:
    """The index of the first feature: 0 if a line uses it, else 1."""
    words = (word.partition(":")[0] for line in lines for word in line.partition("#")[0].split()[1:])
    return int(not any(word.strip("0") == "" for word in words))


def read_svmlight(
    source: str,
    lines: Iterable[str],
    check_bytes: Callable[[int], None],
    width: int | None = None,
    first: int | None = None,
) -> dict[str, NDArray]:
    """The columns `label`, `features` (with zeros) and, if the lines have one, `qid`. `width`: the number of features;
    default: up to the largest index. `first`: the index of the first feature; default: 0 if a line uses it, else 1.
    `check_bytes`: called with the size of the table, zeros included; raises if that is far more than the file."""
    labels: list[str] = []
    groups: list[str] = []
    rows: list[int] = []
    indices: list[int] = []
    values: list[float] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        row = len(labels)
        labels.append(_label(words.pop(0)))
        if words and words[0].startswith("qid:"):
            groups.append(words.pop(0).removeprefix("qid:"))
        for word in words:
            index, colon, value = word.partition(":")
            try:
                if not colon or int(index) < 0:
                    raise ValueError
                indices.append(int(index))
                values.append(float(value))
            except ValueError:
                raise UserError(f"data {source}: {word!r} in line {number} is not INDEX:VALUE") from None
            rows.append(row)
    if not labels:
        raise UserError(f"data {source} has no rows")
    if groups and len(groups) != len(labels):
        raise UserError(f"data {source}: some lines have a qid and others have none")
    columns = np.asarray(indices, dtype=np.int64)
    lowest = int(columns.min()) if len(columns) else 1
    if first is not None and lowest < first:
        raise UserError(f"data {source} has index {lowest}, but in its schema the first feature has index {first}")
    columns -= min(lowest, 1) if first is None else first
    found = int(columns.max()) + 1 if len(columns) else 1
    if width is not None and found > width:
        raise UserError(f"data {source} has an index for feature {found}, its schema declares a width of {width}")
    width = width or found
    if 4 * width * len(labels) > MOST_BYTES:
        raise UserError(
            f"data {source}: {len(labels)} rows of {width} features take {4 * width * len(labels) / 2**30:.0f} GiB "
            f"with their zeros; at most {MOST_BYTES >> 30} are supported"
        )
    check_bytes(4 * width * len(labels))
    table = np.zeros((len(labels), width), dtype=np.float32)
    table[rows, columns] = values
    grouped = {"qid": np.array(groups)} if groups else {}
    return {"label": np.array(labels), "features": table, **grouped}


def _label(word: str) -> str:
    """+1 and 1.0 are the class 1."""
    try:
        return f"{float(word):.15g}"
    except ValueError:
        return word
