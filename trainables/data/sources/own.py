"""Makes a feature file from a user's folder of images, or table of image paths or texts. Nothing is fitted.

Features are extracted in pieces on disk and copied into the file one by one, so they may be larger than memory. When
the file is used, the features of the test rows must fit into memory.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.backbones import own_rows
from trainables.data.backbones.backbone import TEXTS, Backbone
from trainables.data.backbones.extraction import Items, extract_pieces, remove_pieces
from trainables.data.importing.conversion import Assignment, assign_rows, column_of, texts_of
from trainables.data.importing.reading import Table, is_table, read_table
from trainables.data.importing.schema import Schema
from trainables.data.sources.preparing import FORMAT, PROVENANCE, Options, described, partial_folder
from trainables.errors import UserError
from trainables.files import replacing


def is_own(name: str) -> bool:
    """Whether this is a folder or a table of the user's, not the name of a published data set."""
    return Path(name).is_dir() or (is_table(name) and Path(name).is_file())


@dataclass(frozen=True)
class OwnRows:
    """Rows of the user, before features are extracted."""

    source: str
    column: str
    """The column of image paths or texts; "" for a folder."""
    label: str
    values: NDArray
    """Paths or texts."""
    assigned: Assignment
    notes: list[str]


def read_rows(source: str, schema: Schema, column: str) -> OwnRows:
    table, schema = _table(source, schema, column)
    notes: list[str] = []
    assigned = assign_rows(source, table, schema, notes)
    return OwnRows(source, column, schema.label, table[column or own_rows.FILE], assigned, notes)


def prepare(rows: OwnRows, backbone: Backbone, target: Path, options: Options) -> None:
    """Write the feature file."""
    pieces = {}
    for part, chosen in (("train", ~rows.assigned.test), ("test", rows.assigned.test)):
        pieces[f"x_{part}"] = extract_pieces(
            _items(rows.source, rows.values[chosen], rows.column, backbone),
            backbone.network,
            backbone.to_input,
            folder=partial_folder(target),
            identity=backbone.identity,
            device=options.device,
            batch=options.batch or backbone.batch,
            progress=partial(options.on_extract, part),
        )
    try:
        _write(target, rows, pieces, backbone)
    except OSError as error:
        raise UserError(f"data file {target} cannot be written: {error.strerror or error}") from None


def rows_to_predict(path: Path, record: Mapping[str, Any], backbone: Backbone) -> tuple[Items, list[str], list[str]]:
    """New images or texts, their names, and their classes ("" where unknown). `path`: a folder of images, an image, or
    a table with the column that the model was trained on."""
    if path.is_dir():
        files = own_rows.images_in(path)
        if not files:
            raise UserError(f"data {path} has no images; their names end in {', '.join(own_rows.ENDINGS)}")
        classes = [file.parent.name if file.parent != path else "" for file in files]
        return own_rows.ImageFiles(files), [str(file.relative_to(path)) for file in files], classes
    if own_rows.is_image(path):
        return own_rows.ImageFiles([path]), [path.name], [""]
    column = record["column"]
    if not column:
        raise UserError(f"data {path}: the model was trained on a folder of images; give a folder or an image")
    table = read_table(str(path))
    values = texts_of(str(path), {column: column_of(str(path), table, column)}, column, "column")
    known = record["label"] in table
    labels = (
        texts_of(str(path), table, record["label"], "label", required=False) if known else np.array([""] * len(values))
    )
    return _items(str(path), values, column, backbone), values.tolist(), labels.tolist()


def _table(source: str, schema: Schema, column: str) -> tuple[Table, Schema]:
    if Path(source).is_dir():
        if column or schema.client or schema.label or schema.split:
            raise UserError(f"data {source} is a folder: --image, --text, --label, --client and --split are for tables")
        table = own_rows.folder_table(Path(source))
        split = own_rows.SPLIT if own_rows.SPLIT in table else ""
        return table, schema.model_copy(update={"label": own_rows.LABEL, "split": split})
    if not column or not schema.label:
        raise UserError(f"data {source} is a table: name its columns with --label and either --image or --text")
    table = read_table(source)
    for name in filter(None, (column, schema.label, schema.client, schema.split)):
        column_of(source, table, name)
    return table | {column: texts_of(source, table, column, "column")}, schema


def _items(source: str, values: NDArray, column: str, backbone: Backbone) -> Items:
    if not column:
        return own_rows.ImageFiles([Path(value) for value in values])
    if backbone.rows == TEXTS:
        return own_rows.Texts(values)
    return own_rows.ImageFiles(own_rows.column_of_files(source, values))


def _write(target: Path, rows: OwnRows, pieces: Mapping[str, Sequence[Path]], backbone: Backbone) -> None:
    """Write an uncompressed archive, from which train rows can be read block by block."""
    record = np.array(backbone.record(rows.column, rows.label if rows.column else ""))
    arrays: dict[str, Any] = {**rows.assigned.arrays, "backbone": record, **pieces}
    content = hashlib.sha256()
    with replacing(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in sorted(arrays):
            parts = [arrays[name]] if isinstance(arrays[name], np.ndarray) else _loaded(arrays[name])
            first = parts[0]
            shape = (sum(len(part) for part in parts), *first.shape[1:]) if first.ndim else ()
            content.update(f"{name}:{first.dtype.str}:{shape}:".encode())
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": first.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                for part in parts:
                    block = np.ascontiguousarray(part).tobytes()
                    content.update(block)
                    member.write(block)
        provenance = {
            "format": FORMAT,
            "name": target.stem,
            "source": Path(rows.source).name,
            "files": {},
            **described(backbone),
            "notes": ["Images and labels of the user; nothing was fitted to them."],
            "content": f"sha256:{content.hexdigest()}",
        }
        with archive.open(f"{PROVENANCE}.npy", "w") as member:
            np.lib.format.write_array(member, np.array(json.dumps(provenance, sort_keys=True)))
    remove_pieces(partial_folder(target))


def _loaded(paths: Sequence[Path]) -> list[NDArray]:
    return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
