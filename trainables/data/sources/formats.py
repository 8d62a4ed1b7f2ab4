"""The makers' formats, read with suspicion: named members only, never unpacked to disk, never more than is expected,
no pickle beyond plain containers and NumPy arrays."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.data.features import ARRAYS, READ_ERRORS
from trainables.data.sources.catalogue import Source
from trainables.errors import UserError

LARGEST_MEMBER = 1 << 30  # no file of the catalogue has a larger one
Arrays = dict[str, NDArray]
Paths = Mapping[str, Path]
"""The files of a source by their names."""


@dataclass(frozen=True)
class Raw:
    """A source as arrays: `x_train`, `y_train`, `x_test`, `y_test`, for natural partitions `client_train`. Images are
    uint8, rows x height x width x channels."""

    arrays: Arrays
    notes: tuple[str, ...] = ()
    """What a user of the features should know of how they were made."""


def read(source: Source, paths: Paths) -> Raw:
    format = source.format
    try:
        if format == "emnist":
            return _emnist(paths, source.name.removeprefix("emnist-"))
        return _READERS[format](paths)
    except (*READ_ERRORS, ValueError, pickle.UnpicklingError, tarfile.TarError, IndexError, TypeError) as error:
        shown = ", ".join(str(path) for path in paths.values())
        raise UserError(f"{shown} cannot be read as {format}: {error}") from None


# ---- archives


def tar_members(path: Path, wanted: list[str]) -> dict[str, bytes]:
    """Regular files of these very names; whatever else the archive holds is never touched."""
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            if member.name in wanted and member.isreg():
                stream = archive.extractfile(member)
                if stream is not None:
                    found[member.name] = _limited(stream, member.size, member.name)
    return _all_there(found, wanted, path)


def zip_members(path: Path, wanted: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename in wanted:
                with archive.open(info) as stream:
                    found[info.filename] = _limited(stream, info.file_size, info.filename)
    return _all_there(found, wanted, path)


def _limited(stream: IO[bytes], size: int, name: str) -> bytes:
    if size > LARGEST_MEMBER:
        raise ValueError(f"member {name} claims {size:,} bytes")
    content = stream.read(size + 1)
    if len(content) != size:
        raise ValueError(f"member {name} does not have the {size:,} bytes it claims")
    return content


def _all_there(found: dict[str, bytes], wanted: list[str], path: Path) -> dict[str, bytes]:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{path.name} holds no file {missing[0]}")
    return found


class _PlainUnpickler(pickle.Unpickler):
    """CIFAR's batches are pickles, and a pickle can run anything: this one knows arrays and plain containers."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),  # how Python 3 writes bytes for Python 2
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"a pickle in it asks for {module}.{name}, which is never loaded")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


# ---- images


def _cifar(paths: Paths) -> Raw:
    (path,) = paths.values()
    fine = "100" in path.name
    folder = "cifar-100-python" if fine else "cifar-10-batches-py"
    train = ["train"] if fine else [f"data_batch_{i}" for i in range(1, 6)]
    test = ["test"] if fine else ["test_batch"]
    members = tar_members(path, [f"{folder}/{name}" for name in (*train, *test)])
    arrays: Arrays = {}
    for part, names in (("train", train), ("test", test)):
        images, labels = [], []
        for name in names:
            batch = _PlainUnpickler(io.BytesIO(members[f"{folder}/{name}"]), encoding="bytes").load()
            pixels = np.asarray(batch[b"data"], dtype=np.uint8)
            images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(np.asarray(batch[b"fine_labels" if fine else b"labels"], dtype=np.uint8))
        arrays[f"x_{part}"], arrays[f"y_{part}"] = np.concatenate(images), np.concatenate(labels)
    return Raw(arrays)


def _medmnist(paths: Paths) -> Raw:
    (path,) = paths.values()
    with np.load(path, allow_pickle=False) as file:
        arrays = {}
        for part in ("train", "test"):  # their `val` is left aside: ours is cut from the train rows
            images, labels = file[f"{part}_images"], file[f"{part}_labels"]
            if labels.ndim == 2 and labels.shape[1] != 1:
                raise ValueError("it has several labels per image")
            arrays[f"x_{part}"] = images if images.ndim == 4 else images[..., None]
            arrays[f"y_{part}"] = labels.reshape(len(images)).astype(np.uint8)
    return Raw(arrays, ("MedMNIST's own validation split is left aside: the held-out rows come from the train rows.",))


def idx(content: bytes) -> NDArray[np.uint8]:
    """The format of MNIST: two zero bytes, the type (8: unsigned bytes), the number of dimensions, their sizes."""
    zero, kind, dimensions = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind != 8 or not 1 <= dimensions <= 3:
        raise ValueError("it does not begin as an idx file of bytes does")
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    body = content[4 + 4 * dimensions :]
    if len(body) != np.prod([int(size) for size in shape]):
        raise ValueError(f"it announces {shape} bytes and holds {len(body)}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def gunzipped(content: bytes, name: str) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as stream:
            found = stream.read(LARGEST_MEMBER + 1)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{name} is cut off or damaged: {error}") from None
    if len(found) > LARGEST_MEMBER:
        raise ValueError(f"{name} is larger than any file of the catalogue")
    return found


def _idx_files(paths: Paths) -> Raw:
    contents = [idx(gunzipped(path.read_bytes(), name)) for name, path in paths.items()]
    x_train, y_train, x_test, y_test = contents
    return Raw({"x_train": x_train[..., None], "y_train": y_train, "x_test": x_test[..., None], "y_test": y_test})


def _emnist(paths: Paths, split: str) -> Raw:
    """One split of the archive; images are stored transposed."""
    (path,) = paths.values()
    names = [
        f"gzip/emnist-{split}-{part}-{what}-ubyte.gz"
        for part in ("train", "test")
        for what in ("images-idx3", "labels-idx1")
    ]
    members = zip_members(path, names)
    x_train, y_train, x_test, y_test = (idx(gunzipped(members[name], name)) for name in names)
    upright = (np.ascontiguousarray(x.transpose(0, 2, 1))[..., None] for x in (x_train, x_test))
    return Raw(dict(zip(ARRAYS, (next(upright), y_train, next(upright), y_test), strict=True)))


# ---- tables


def _libsvm(paths: Paths) -> Raw:
    """`LABEL INDEX:VALUE …` by line, indices from 1, labels -1 and +1; features and labels small enough for bytes."""
    rows = [_libsvm_rows(path) for path in paths.values()]
    features = max(index for entries, _ in rows for row in entries for index, _ in row)
    arrays: Arrays = {}
    for part, (entries, labels) in zip(("train", "test"), rows, strict=True):
        x = np.zeros((len(entries), features), dtype=np.uint8)
        for row, values in enumerate(entries):
            for index, value in values:
                x[row, index - 1] = value
        arrays[f"x_{part}"], arrays[f"y_{part}"] = x, np.asarray(labels, dtype=np.uint8)
    return Raw(arrays)


def _libsvm_rows(path: Path) -> tuple[list[list[tuple[int, int]]], list[int]]:
    entries: list[list[tuple[int, int]]] = []
    labels: list[int] = []
    for line in path.read_text(encoding="ascii").splitlines():
        label, *pairs = line.split()
        row = [(int(index), int(value)) for index, value in (pair.split(":") for pair in pairs)]
        if any(index < 1 or not 0 <= value <= 255 for index, value in row) or label not in ("-1", "+1", "1"):
            raise ValueError(f"line {len(labels) + 1} of {path.name} is not a row of a9a")
        entries.append(row)
        labels.append(int(label != "-1"))
    return entries, labels


HEART_COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
"""Those that all four hospitals have; slope, ca and thal are missing nearly everywhere but in Cleveland."""
HEART_SCALE = {"age": 100.0, "trestbps": 200.0, "chol": 600.0, "thalach": 220.0, "oldpeak": 6.0}
"""Divisors known beforehand, so that scaling looks at no patient."""
HEART_TRAIN = 0.66
SPLIT_SEED = 42


def _heart(paths: Paths) -> Raw:
    """One client per hospital; a row with a missing value is left out; the label is whether there is disease."""
    parts: dict[str, list[NDArray]] = {}
    rng = np.random.Generator(np.random.Philox(key=SPLIT_SEED))
    for client, path in enumerate(paths.values()):
        table = pd.read_csv(path, header=None, na_values="?")
        if table.shape[1] != 14:
            raise ValueError(f"{path.name} has {table.shape[1]} columns, not 14")
        table = table.drop(columns=[10, 11, 12]).dropna()
        known = dict(zip(HEART_COLUMNS, (table[column].to_numpy(np.float64) for column in range(10)), strict=True))
        columns = [known[name] / HEART_SCALE.get(name, 1.0) for name in known if name not in ("cp", "restecg")]
        columns += [(known["cp"] == kind).astype(float) for kind in (2, 3, 4)]
        columns += [(known["restecg"] == kind).astype(float) for kind in (1, 2)]
        x, y = np.stack(columns, axis=1).astype(np.float32), (table[13].to_numpy() > 0).astype(np.uint8)
        _split(parts, x, y, client, _train_rows(y, HEART_TRAIN, rng))
    notes = (
        "66% of every hospital's rows, by label, are its train rows (our own draw: FLamby's comes from scikit-learn).",
        "Numbers are divided by constants known beforehand, not by statistics of the patients.",
    )
    return Raw({name: np.concatenate(arrays) for name, arrays in parts.items()}, notes)


def _tcga(paths: Paths) -> Raw:
    """FLamby's table: patient, 39 covariates, E (death observed), T (days); its own split, one client per region."""
    table, folds = (pd.read_csv(path) for path in paths.values())
    if table.shape[1] != 42 or list(table.columns[[0, 40, 41]]) != ["pid", "E", "T"]:
        raise ValueError("brca.csv is not of the form pid, 39 covariates, E, T")
    joined = table.merge(folds[["pid", "fold2"]], on="pid", validate="one_to_one")
    if len(joined) != len(table):
        raise ValueError(f"{len(table) - len(joined)} patients of brca.csv are in no fold")
    parts: dict[str, list[NDArray]] = {}
    part, region = joined["fold2"].str.split("_").str[0], joined["fold2"].str.split("_").str[1].astype(int)
    for client in sorted(region.unique()):
        mine = joined[region == client]
        x = mine[table.columns[1:40]].to_numpy(np.float32)
        y = mine["E"].to_numpy().astype(np.uint8)
        _split(parts, x, y, int(client), (part[region == client] == "train").to_numpy())
    note = "Survival is reduced to whether death was observed: the times T are not used, and no Cox model is fitted."
    return Raw({name: np.concatenate(arrays) for name, arrays in parts.items()}, (note,))


def _train_rows(y: NDArray, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    chosen = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        chosen[rows[: round(share * len(rows))]] = True
    return chosen


def _split(parts: dict[str, list[NDArray]], x: NDArray, y: NDArray, client: int, train: NDArray[np.bool_]) -> None:
    clients = np.full(len(y), client, dtype=np.uint8)
    for name, rows in (("x_train", x[train]), ("y_train", y[train]), ("client_train", clients[train])):
        parts.setdefault(name, []).append(rows)
    for name, rows in (("x_test", x[~train]), ("y_test", y[~train]), ("client_test", clients[~train])):
        parts.setdefault(name, []).append(rows)


_READERS: dict[str, Callable[[Paths], Raw]] = {
    "cifar": _cifar,
    "medmnist": _medmnist,
    "idx": _idx_files,
    "libsvm": _libsvm,
    "heart": _heart,
    "tcga": _tcga,
}
