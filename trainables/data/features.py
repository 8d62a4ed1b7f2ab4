"""Frozen features: loads an npz file, a table, a built-in generator or a plug-in's arrays, and validates them."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data import simulated, synthetic
from trainables.data.feature_file import (
    ARRAYS,
    CLIENT_COLUMN,
    LARGEST_FEATURE,
    NAMES,
    OPTIONAL,
    TEST_CLIENT_COLUMN,
    read_backbone,
    read_npz,
    sha256,
)
from trainables.data.importing.conversion import convert_new_rows, load_table
from trainables.data.importing.reading import is_table
from trainables.data.importing.schema import schema_from_json
from trainables.data.names import Names, given_names, number_clients, number_labels, number_test_clients, text_array
from trainables.data.sources.catalogue import UNPUBLISHED, recipe
from trainables.data.sources.fetching import data_folder
from trainables.data.stored import StoredRows
from trainables.errors import UserError, in_range
from trainables.plugin_errors import plugin_errors
from trainables.urls import as_user_error, shown_url

Rows = NDArray[np.int64]

PLUGIN_SOURCES: dict[str, Callable[[str], Mapping[str, NDArray]]] = {}
"""Data sources of plug-ins by name: data `NAME:TEXT` is loaded by calling the function of NAME with TEXT."""


@dataclass(frozen=True)
class ValidationSet:
    """Rows of the train set that are held out for validation."""

    rows: Rows
    x: NDArray[np.float32]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class FeatureSet:
    """Features (rows x features, float32) and labels (int64, 0 to classes - 1) of the train and the test set."""

    name: str
    fingerprint: str
    """Identifies the content: the SHA-256 of the file or the arrays, or the generator with all its settings."""
    x_train: NDArray[np.float32] | StoredRows
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    client_train: NDArray[np.int64] | None = None
    """The client of every train row, if the data set defines clients (the `explicit` partition)."""
    task: str = ""
    """The model that simulated labels were drawn from; `poisson` labels are counts, not classes."""
    truth: NDArray[np.float64] | None = None
    """The weights of that model: (features + 1, columns)."""
    client_test: NDArray[np.int64] | None = None
    """The client of every test row, for metrics by client."""
    class_names: Names = ()
    """The names of the classes, in order; () if labels are numbers and the data gives no names."""
    client_names: Names = ()
    """The original ids of the clients, in order; () if they were numbers from 0 without a gap, and the data gives no
    names."""
    schema: str = ""
    """JSON text of the schema by which rows of a table become features; "" if there was no table."""
    backbone: str = ""
    """JSON text about the backbone that the features come from; "" if the file does not say."""
    notes: tuple[str, ...] = ()
    """What the owner of a table should know: values that were replaced or moved into their range."""

    @cached_property
    def classes(self) -> int:
        """The number of class names or, without names, the largest label plus one. It is treated as public."""
        return len(self.class_names) or int(self.y_train.max()) + 1

    @property
    def features(self) -> int:
        return int(self.x_train.shape[1])

    @property
    def clients(self) -> int | None:
        """The number of clients that the data set defines."""
        return None if self.client_train is None else int(self.client_train.max()) + 1

    def validation_rows(self, fraction: float, seed: int, stratified: bool = True) -> Rows:
        """The train rows to hold out, ascending, drawn with the seed. If `stratified`, the same fraction of every class
        is drawn. Otherwise the draw does not use the labels, so it reveals nothing about them."""
        in_range(0, 1, "()", validation_fraction=fraction)
        rng = np.random.Generator(np.random.Philox(key=seed))
        strata = [np.arange(len(self.y_train))]
        if stratified:
            strata = [np.flatnonzero(self.y_train == label) for label in range(self.classes)]
        chosen = [rng.permutation(rows)[: round(fraction * len(rows))] for rows in strata]
        validation_rows = np.sort(np.concatenate(chosen))
        if len(validation_rows) == 0:
            raise UserError(f"validation_fraction = {fraction:g} of {len(self.y_train)} rows is no row")
        return validation_rows

    def validation_set(self, fraction: float, seed: int, stratified: bool = True) -> ValidationSet:
        """The content of `validation_rows`, read once and shared by all partitions."""
        split = fraction, seed, stratified
        if split not in self._validation_sets:
            rows = self.validation_rows(*split)
            self._validation_sets[split] = ValidationSet(rows, self.x_train[rows], self.y_train[rows])
        return self._validation_sets[split]

    @cached_property
    def _validation_sets(self) -> dict[tuple[float, int, bool], ValidationSet]:
        return {}


def load(name: str, seed: int = 42) -> FeatureSet:
    """Load a built-in set, a simulation, a plug-in's data, or the npz file or table at a path or URL. `seed` is used
    only by simulations whose name has no seed."""
    simulation = simulated.parse(name, seed)
    if simulation is not None:
        data = _validated(name, simulation.fingerprint, simulation.draw(), counts=simulation.task == "poisson")
        return replace(data, task=simulation.task, truth=simulation.truth)
    generated = synthetic.generate(name)
    if generated is not None:
        return _validated(name, *generated)
    kind, _, parameter = name.partition(":")
    if kind in PLUGIN_SOURCES:
        with plugin_errors(f"data source {kind!r}"):
            arrays = PLUGIN_SOURCES[kind](parameter)
        return from_arrays(arrays, name)
    if is_table(name) and ("://" in name or os.path.isfile(name)):
        with as_user_error(f"data {name} cannot be read"):
            table = load_table(name)
            return replace(from_arrays(table.arrays, Path(name).stem), notes=tuple(table.notes))
    if "://" in name:
        with as_user_error(f"data {name} cannot be read"):
            return _from_file(name)
    if not os.path.isfile(name):  # Path.is_file may raise for a name that no file can have
        raise UserError(_not_found(name))
    return _from_file(name)


def _from_file(source: str) -> FeatureSet:
    return _validated(Path(shown_url(source)).stem, f"sha256:{sha256(source)}", read_npz(source))


def _not_found(name: str) -> str:
    """The error for a file that does not exist: how to make it, or what was probably meant."""
    if os.path.isdir(name):
        command = f"fedsweep data import {shlex.quote(name)}"
        return f"data {name!r} is a folder; make a feature file: {command} (arrays) or fedsweep data prepare (images)"
    if not name.endswith(".npz") and not is_table(name):
        return f"data {name!r} is neither a file nor a built-in set ({', '.join([*synthetic.FORMS, simulated.FORM])})"
    path, near = Path(name), list[str]()
    known = recipe(path.stem)
    if known is not None:
        return f"data {name!r} does not exist; make it with: fedsweep data prepare {known.name}"
    if path.stem in UNPUBLISHED:
        return (
            f"data {name!r} does not exist, and no published source has it ({UNPUBLISHED[path.stem]}); put a file with "
            f"{', '.join(ARRAYS)} into {data_folder()}, or use PathMNIST: fedsweep data prepare pathmnist-resnet20"
        )
    with contextlib.suppress(OSError):  # a name that no file can have
        near = [file.name for file in path.parent.glob("*.npz")]
    close = difflib.get_close_matches(path.name, near, n=1)
    hint = f"; did you mean {path.parent / close[0]}?" if close else ""
    return f"data {name!r} was found neither next to the study, nor in the current folder, nor in {data_folder()}{hint}"


def from_arrays(arrays: Mapping[str, NDArray], name: str = "arrays") -> FeatureSet:
    """Arrays from memory, validated like a file."""
    missing = [key for key in ARRAYS if key not in arrays]
    unknown = [key for key in arrays if key not in (*ARRAYS, *OPTIONAL, *NAMES)]
    if missing or unknown:
        expected = f"it needs {', '.join(ARRAYS)} and may have {', '.join((*OPTIONAL, *NAMES))}"
        verb = "lacks the" if missing else "has the unknown"
        raise UserError(f"data {name}: {verb} array {(missing or unknown)[0]!r}; {expected}")
    converted = {key: text_array(value) for key, value in arrays.items()}
    digest = hashlib.sha256()
    for key, values in sorted(converted.items()):
        digest.update(f"{key} {values.dtype.str} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return _validated(name, f"sha256-arrays:{digest.hexdigest()}", converted)


class RowsToPredict(NamedTuple):
    x: NDArray[np.float32]
    labels: NDArray | None
    """Names or numbers of the classes; None if the file has no labels."""
    notes: Sequence[str] = ()
    """Values of a table that were replaced or moved into their range."""


def rows_to_predict(path: str, schema: str = "", backbone: str = "") -> RowsToPredict:
    """The test rows of a feature file or a built-in set, or all rows of a table. `schema`, `backbone`: how the rows
    that the model was trained on became features, as JSON; "" if it is not known."""
    if is_table(path) or os.path.isdir(path):
        if not schema:
            raise UserError(f"data {path} is a table or folder, and the model was trained on a feature file; give one")
        return RowsToPredict(*convert_new_rows(path, schema_from_json(path, schema)))
    if not os.path.isfile(path):
        data = load(path)
        return RowsToPredict(data.x_test, np.array(data.class_names)[data.y_test] if data.class_names else data.y_test)
    optional = ("y_test", "class_names", "schema", "backbone")
    arrays, name = read_npz(path, needs=("x_test",), optional=optional), Path(path).stem
    _check_origin(path, name, arrays, schema, backbone)
    x, labels = _validated_features(name, "x_test", arrays["x_test"]), arrays.get("y_test")
    if labels is None or (labels.dtype.kind == "U" and labels.shape == (len(x),)):
        return RowsToPredict(x, labels)
    labels, names = _validated_labels(name, "y_test", labels, len(x)), given_names(name, arrays, "class_names")
    if names and labels.max() >= len(names):
        raise UserError(f"data {name}: label {labels.max()} in y_test is out of range: there are {len(names)} names")
    return RowsToPredict(x, np.array(names)[labels] if names else labels)


def _check_origin(path: str, name: str, arrays: Mapping[str, Any], schema: str, backbone: str) -> None:
    """Refuse features that were made in another way than those that the model was trained on."""
    if schema and (own := _json_text(name, arrays, "schema")):
        given, expected = (schema_from_json(name, text) for text in (own, schema))
        theirs, ours = given.columns or {}, expected.columns or {}
        if list(theirs.items()) != list(ours.items()) or given.first_index != expected.first_index:
            changed = [f"column {column!r}" for column in ours if theirs.get(column) != ours[column]]
            changed += ["the index of the first feature"] * (given.first_index != expected.first_index)
            what = f"{changed[0]} differs" if changed else "the columns differ in number or order"
            raise UserError(
                f"data {path} was imported by another schema than the model's data: {what}; predict the table itself, "
                "or import it by the same schema"
            )
    if backbone and (own := _backbone(name, arrays)):
        theirs, ours = (read_backbone(text) for text in (own, backbone))
        if any(theirs.get(key) != ours.get(key) for key in ("name", "details")):
            other = f"{theirs['name']!r}" if theirs["name"] != ours["name"] else "other weights or preprocessing"
            raise UserError(f"the features of {path} come from {other}, those of the model from {ours['name']!r}")


def _validated(name: str, fingerprint: str, arrays: Mapping[str, Any], *, counts: bool = False) -> FeatureSet:
    """`counts`: labels are counts, which need not be 0 to classes - 1."""
    x_train = arrays["x_train"]
    if isinstance(x_train, StoredRows):
        for first, block in x_train.blocks():
            _validated_features(name, "x_train", block, first)
    else:
        x_train = _validated_features(name, "x_train", x_train)
    x_test = _validated_features(name, "x_test", arrays["x_test"])
    if x_train.shape[1] != x_test.shape[1]:
        raise UserError(f"data {name}: x_train has {x_train.shape[1]} features, x_test has {x_test.shape[1]}")
    labels, class_names = number_labels(name, arrays, given_names(name, arrays, "class_names"))
    y_train = _validated_labels(name, "y_train", labels["y_train"], len(x_train))
    y_test = _validated_labels(name, "y_test", labels["y_test"], len(x_test))
    if not counts:
        _check_classes(name, y_train, y_test, class_names)
    clients, client_names = None, given_names(name, arrays, "client_names")
    if CLIENT_COLUMN in arrays:
        clients, client_names = number_clients(name, arrays[CLIENT_COLUMN], len(x_train), client_names)
    of_test = None
    if TEST_CLIENT_COLUMN in arrays:
        of_test = number_test_clients(name, arrays[TEST_CLIENT_COLUMN], len(x_test), arrays.get(CLIENT_COLUMN))
    return FeatureSet(
        *(name, fingerprint, x_train, y_train, x_test, y_test, clients),
        client_test=of_test,
        class_names=class_names,
        client_names=client_names,
        schema=_schema(name, arrays),
        backbone=_backbone(name, arrays),
    )


def _schema(name: str, arrays: Mapping[str, Any]) -> str:
    text = _json_text(name, arrays, "schema")
    return schema_from_json(name, text).to_json() if text else ""


def _backbone(name: str, arrays: Mapping[str, Any]) -> str:
    text = _json_text(name, arrays, "backbone")
    try:
        return json.dumps(read_backbone(text)) if text else ""
    except (ValueError, RecursionError):
        raise UserError(f"data {name}: its description of the backbone is damaged") from None


def _json_text(name: str, arrays: Mapping[str, Any], key: str) -> str:
    text = arrays.get(key)
    if text is None:
        return ""
    if text.ndim or text.dtype.kind != "U":
        raise UserError(f"data {name}: {key} must be a text, but is {text.dtype} of shape {text.shape}")
    return str(text)


def _check_classes(name: str, y_train: NDArray[np.int64], y_test: NDArray[np.int64], names: Names) -> None:
    rows = np.bincount(y_train, minlength=len(names))
    if len(rows) < 2:
        raise UserError(f"data {name}: y_train holds a single class")
    if names and len(rows) > len(names):
        raise UserError(f"data {name}: label {len(rows) - 1} in y_train is out of range: there are {len(names)} names")
    if not names and (rows == 0).any():
        raise UserError(
            f"data {name}: y_train holds the label {len(rows) - 1} but not the label "
            f"{int(np.flatnonzero(rows == 0)[0])}; labels must be 0 to classes - 1"
        )
    if y_test.max() >= len(rows):
        raise UserError(
            f"data {name}: label {int(y_test.max())} in y_test is out of range, y_train has {len(rows)} classes"
        )


def _validated_features(name: str, key: str, x: NDArray, first: int = 0) -> NDArray[np.float32]:
    """`first`: the number of the first row of `x` in the file, for error messages."""
    if x.ndim != 2 or 0 in x.shape or x.dtype.kind not in "fiub":
        raise UserError(
            f"data {name}: {key} must be a table of numbers, rows x features, but is {x.dtype} of shape {x.shape}"
        )
    with np.errstate(over="ignore"):  # overflow gives inf, rejected below
        converted = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(converted).all():
        row = first + int(np.flatnonzero(~np.isfinite(converted).all(axis=1))[0])
        raise UserError(f"data {name}: {key} has a value that is nan or infinite in row {row}")
    if np.abs(converted).max() > LARGEST_FEATURE:
        raise UserError(f"data {name}: {key} has a value beyond ±{LARGEST_FEATURE:g}; scale the features")
    return converted


def _validated_labels(name: str, key: str, y: NDArray, rows: int) -> NDArray[np.int64]:
    if y.shape != (rows,) or y.dtype.kind not in "iu":
        raise UserError(
            f"data {name}: {key} must be {rows} whole numbers, one per row, but is {y.dtype} of shape {y.shape}"
        )
    labels = y.astype(np.int64)
    if labels.min() < 0 or labels.max() >= 100_000:
        bad = int(labels.min()) if labels.min() < 0 else int(labels.max())
        raise UserError(f"data {name}: label {bad} in {key} is out of range")
    return labels
