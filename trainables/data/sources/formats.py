"""Readers of published formats. Files are not trusted: only named members are read, nothing is unpacked to disk, sizes
are limited, and pickles may hold only plain containers and NumPy arrays."""

from __future__ import annotations

import gzip
import io
import math
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

from trainables.data.feature_file import READ_ERRORS
from trainables.data.sources.catalogue import Source
from trainables.errors import UserError

LARGEST_MEMBER = 1 << 30  # bytes; larger than any in the catalogue
Arrays = dict[str, NDArray]
Paths = Mapping[str, Path]
"""The files of a source by name."""


@dataclass(frozen=True)
class Raw:
    """A source as arrays: `x_train`, `y_train`, `x_test`, `y_test`, and `client_train` and `client_test` if it defines
    clients. Images are uint8 of shape (rows, height, width, channels)."""

    arrays: Arrays
    notes: tuple[str, ...] = ()
    """What users of the features should know about how they were made."""


def read(source: Source, paths: Paths) -> Raw:
    try:
        if source.format == "emnist":
            return _emnist(paths, source.name.removeprefix("emnist-"))
        return _READERS[source.format](paths)
    except (*READ_ERRORS, ValueError, pickle.UnpicklingError, tarfile.TarError, IndexError, TypeError) as error:
        names = ", ".join(str(path) for path in paths.values())
        raise UserError(f"{names} cannot be read as {source.format}: {error}") from None


# ---- archives


def tar_members(path: Path, names: list[str]) -> dict[str, bytes]:
    """Regular files with these names; no other member is read."""
    with tarfile.open(path, "r:*") as archive:
        members = {}
        for info in archive:
            if info.name in names and info.isreg() and (stream := archive.extractfile(info)) is not None:
                members[info.name] = _read_member(stream, info.size, info.name)
    return _require(members, names, path)


def zip_members(path: Path, names: list[str]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        members = {}
        for info in archive.infolist():
            if info.filename in names:
                with archive.open(info) as stream:
                    members[info.filename] = _read_member(stream, info.file_size, info.filename)
    return _require(members, names, path)


def _read_member(stream: IO[bytes], size: int, name: str) -> bytes:
    if size > LARGEST_MEMBER:
        raise ValueError(f"member {name} claims {size:,} bytes")
    content = stream.read(size + 1)
    if len(content) != size:
        raise ValueError(f"member {name} does not have the {size:,} bytes it claims")
    return content


def _require(members: dict[str, bytes], names: list[str], path: Path) -> dict[str, bytes]:
    for name in names:
        if name not in members:
            raise ValueError(f"{path.name} holds no file {name}")
    return members


class _PlainUnpickler(pickle.Unpickler):
    """CIFAR's batches are pickles, which can run arbitrary code: only arrays and plain containers are allowed."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),  # bytes that Python 3 pickled for Python 2
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"a pickle in it asks for {module}.{name}, which is not allowed")
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
        for part in ("train", "test"):  # `val` is not used: validation rows come from the train rows
            images, labels = file[f"{part}_images"], file[f"{part}_labels"]
            if labels.ndim == 2 and labels.shape[1] != 1:
                raise ValueError("it has several labels per image")
            arrays[f"x_{part}"] = images if images.ndim == 4 else images[..., None]
            arrays[f"y_{part}"] = labels.reshape(len(images)).astype(np.uint8)
    return Raw(arrays, ("MedMNIST's own validation split is not used: the validation rows come from the train rows.",))


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """MNIST's format: two zero bytes, the type (8: unsigned bytes), the number of dimensions, their sizes."""
    zero, kind, dimensions = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind != 8 or not 1 <= dimensions <= 3:
        raise ValueError("it has no idx header for bytes")
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    body = content[4 + 4 * dimensions :]
    if len(body) != math.prod(shape):
        raise ValueError(f"its header says {shape} bytes, but it has {len(body)}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def gunzip(content: bytes, name: str) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as stream:
            unzipped = stream.read(LARGEST_MEMBER + 1)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{name} is truncated or damaged: {error}") from None
    if len(unzipped) > LARGEST_MEMBER:
        raise ValueError(f"{name} is larger than any file of the catalogue")
    return unzipped


def _idx_files(paths: Paths) -> Raw:
    x_train, y_train, x_test, y_test = (parse_idx(gunzip(path.read_bytes(), name)) for name, path in paths.items())
    return Raw({"x_train": x_train[..., None], "y_train": y_train, "x_test": x_test[..., None], "y_test": y_test})


def _emnist(paths: Paths, split: str) -> Raw:
    """One split of the archive, which stores images transposed."""
    (path,) = paths.values()
    names = [
        f"gzip/emnist-{split}-{part}-{what}-ubyte.gz"
        for part in ("train", "test")
        for what in ("images-idx3", "labels-idx1")
    ]
    members = zip_members(path, names)
    x_train, y_train, x_test, y_test = (parse_idx(gunzip(members[name], name)) for name in names)
    x_train, x_test = (np.ascontiguousarray(x.transpose(0, 2, 1))[..., None] for x in (x_train, x_test))
    return Raw({"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test})


# ---- tables


def _libsvm(paths: Paths) -> Raw:
    """Lines `LABEL INDEX:VALUE …` with indices from 1, labels -1 and +1, and values that fit into a byte."""
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
"""The columns that all four hospitals recorded; slope, ca and thal are mostly missing outside Cleveland."""
HEART_SCALE = {"age": 100.0, "trestbps": 200.0, "chol": 600.0, "thalach": 220.0, "oldpeak": 6.0}
"""Constant divisors, so that scaling does not depend on patients."""
HEART_TRAIN = 0.66
SPLIT_SEED = 42


def _heart(paths: Paths) -> Raw:
    """One client per hospital. Rows with missing values are dropped. The label is whether there is disease."""
    parts: dict[str, list[NDArray]] = {}
    rng = np.random.Generator(np.random.Philox(key=SPLIT_SEED))
    for client, path in enumerate(paths.values()):
        table = pd.read_csv(path, header=None, na_values="?")
        if table.shape[1] != 14:
            raise ValueError(f"{path.name} has {table.shape[1]} columns, not 14")
        table = table.drop(columns=[10, 11, 12]).dropna()
        by_name = dict(zip(HEART_COLUMNS, (table[column].to_numpy(np.float64) for column in range(10)), strict=True))
        columns = [by_name[name] / HEART_SCALE.get(name, 1.0) for name in by_name if name not in ("cp", "restecg")]
        columns += [(by_name["cp"] == kind).astype(float) for kind in (2, 3, 4)]
        columns += [(by_name["restecg"] == kind).astype(float) for kind in (1, 2)]
        x, y = np.stack(columns, axis=1).astype(np.float32), (table[13].to_numpy() > 0).astype(np.uint8)
        _split(parts, x, y, client, _train_rows(y, HEART_TRAIN, rng))
    notes = (
        "66% of every hospital's rows of each label are train rows (drawn here; FLamby draws with scikit-learn).",
        "Features are divided by constants, not by statistics of the patients.",
    )
    return Raw({name: np.concatenate(arrays) for name, arrays in parts.items()}, notes)


def _tcga(paths: Paths) -> Raw:
    """FLamby's table: patient, 39 covariates, E (death observed), T (days). One client per region, FLamby's split."""
    table, folds = (pd.read_csv(path) for path in paths.values())
    if table.shape[1] != 42 or list(table.columns[[0, 40, 41]]) != ["pid", "E", "T"]:
        raise ValueError("brca.csv does not have the columns pid, 39 covariates, E, T")
    joined = table.merge(folds[["pid", "fold2"]], on="pid", validate="one_to_one")
    if len(joined) != len(table):
        raise ValueError(f"{len(table) - len(joined)} patients of brca.csv are in no fold")
    parts: dict[str, list[NDArray]] = {}
    part, region = joined["fold2"].str.split("_").str[0], joined["fold2"].str.split("_").str[1].astype(int)
    for client in sorted(region.unique()):
        rows = joined[region == client]
        x = rows[table.columns[1:40]].to_numpy(np.float32)
        y = rows["E"].to_numpy().astype(np.uint8)
        _split(parts, x, y, int(client), (part[region == client] == "train").to_numpy())
    note = "Survival is reduced to whether death was observed: the times T are not used, and no Cox model is fitted."
    return Raw({name: np.concatenate(arrays) for name, arrays in parts.items()}, (note,))


def _train_rows(y: NDArray, fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A mask with this fraction of every label."""
    chosen = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        chosen[rows[: round(fraction * len(rows))]] = True
    return chosen


def _split(parts: dict[str, list[NDArray]], x: NDArray, y: NDArray, client: int, train: NDArray[np.bool_]) -> None:
    """Append a client's rows to the train and the test arrays."""
    clients = np.full(len(y), client, dtype=np.uint8)
    for part, mask in (("train", train), ("test", ~train)):
        for name, values in (("x", x), ("y", y), ("client", clients)):
            parts.setdefault(f"{name}_{part}", []).append(values[mask])


_READERS: dict[str, Callable[[Paths], Raw]] = {
    "cifar": _cifar,
    "medmnist": _medmnist,
    "idx": _idx_files,
    "libsvm": _libsvm,
    "heart": _heart,
    "tcga": _tcga,
}
