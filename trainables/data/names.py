"""Class labels and client ids as consecutive numbers, with their original names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError

Names = tuple[str, ...]
LONGEST_NAME = 1000  # characters


def text_array(values: Any) -> NDArray:
    """Convert to an array. An object array that holds only text, as in pandas, becomes a text array."""
    array = np.asarray(values)
    if array.dtype.kind in "OT" and array.size and all(isinstance(value, str) for value in array.flat):
        return array.astype(str)
    return array


def check_text(what: str, texts: Iterable[str]) -> None:
    """Refuse lone surrogates: Python, JSON and NumPy can hold them, but they cannot be encoded as UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{what}: {str(text)!a:.80} is not text") from None


def given_names(data: str, arrays: Mapping[str, Any], key: str) -> Names:
    """The names that a feature file states, () if it states none."""
    names = arrays.get(key)
    if names is None:
        return ()
    if names.ndim != 1 or names.dtype.kind != "U" or names.dtype.itemsize > 4 * LONGEST_NAME:
        raise UserError(f"data {data}: {key} must be a list of texts, but is {names.dtype} of shape {names.shape}")
    if len(set(names.tolist())) != len(names):
        raise UserError(f"data {data}: {key} has a name twice")
    check_text(f"data {data}: {key}", names.tolist())
    return tuple(names.tolist())


def number_labels(data: str, arrays: Mapping[str, Any], names: Names) -> tuple[dict[str, NDArray], Names]:
    """Text labels as numbers in the order of `names`; without names, in alphabetical order. Numeric labels are returned
    unchanged."""
    labels = {key: arrays[key] for key in ("y_train", "y_test")}
    if not any(array.dtype.kind == "U" for array in labels.values()):
        return labels, names
    for key, array in labels.items():
        if array.dtype.kind != "U":
            raise UserError(f"data {data}: {key} holds {array.dtype} labels, the other set has text")
    if not names:
        names = tuple(sorted({*labels["y_train"].flat, *labels["y_test"].flat}))
        check_text(f"data {data}: y_train", names)
    return {key: _numbers(data, key, array, names) for key, array in labels.items()}, tuple(map(str, names))


def _numbers(data: str, key: str, labels: NDArray, names: Sequence[str]) -> NDArray[np.int64]:
    distinct, inverse = np.unique(labels, return_inverse=True)
    known = {name: number for number, name in enumerate(names)}
    unknown = [str(label) for label in distinct if label not in known]
    if unknown:
        raise UserError(f"data {data}: label {unknown[0]!r} in {key} is not one of its class names")
    return np.array([known[str(label)] for label in distinct], dtype=np.int64)[inverse].reshape(labels.shape)


def number_clients(data: str, ids: NDArray, rows: int, names: Names) -> tuple[NDArray[np.int64], Names]:
    """Client ids, whole numbers or text, as numbers without gaps, in ascending order of the ids."""
    if ids.shape != (rows,) or ids.dtype.kind not in "iuU":
        raise UserError(
            f"data {data}: client_train must be {rows} whole numbers or texts, one per row, but is {ids.dtype} of "
            f"shape {ids.shape}"
        )
    if ids.dtype.kind != "U" and (ids < 0).any():
        raise UserError(f"data {data}: client {ids.min()} in client_train is negative")
    distinct, numbers = np.unique(ids, return_inverse=True)
    if names and ids.dtype.kind != "U" and int(distinct[-1]) < len(names):
        return numbers.astype(np.int64), tuple(names[int(number)] for number in distinct)
    if names:
        raise UserError(f"data {data}: client {distinct[-1]} in client_train has no entry in client_names")
    if ids.dtype.kind == "U":
        check_text(f"data {data}: client_train", distinct.tolist())
    consecutive = ids.dtype.kind != "U" and int(distinct[-1]) == len(distinct) - 1
    return numbers.astype(np.int64), () if consecutive else tuple(map(str, distinct))


def number_test_clients(data: str, ids: NDArray, rows: int, train_ids: NDArray | None) -> NDArray[np.int64]:
    """The clients of the test rows, numbered like those of the train rows."""
    if train_ids is None:
        raise UserError(f"data {data}: it has client_test and lacks client_train")
    if ids.shape != (rows,) or (ids.dtype.kind == "U") != (train_ids.dtype.kind == "U") or ids.dtype.kind not in "iuU":
        raise UserError(
            f"data {data}: client_test must be {rows} ids like those of client_train, one per row, but is {ids.dtype} "
            f"of shape {ids.shape}"
        )
    distinct = np.unique(train_ids)
    numbers = np.searchsorted(distinct, ids).clip(max=len(distinct) - 1)
    if (unknown := distinct[numbers] != ids).any():
        raise UserError(f"data {data}: client {ids[unknown][0]} in client_test has no row in client_train")
    return numbers.astype(np.int64)
