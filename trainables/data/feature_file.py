"""Reads feature files: npz archives of arrays. Nothing in them is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainables.data.stored import StoredRows, open_file, stream_if_large
from trainables.errors import UserError

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
CLIENT_COLUMN = "client_train"
TEST_CLIENT_COLUMN = "client_test"
OPTIONAL = (CLIENT_COLUMN, TEST_CLIENT_COLUMN)
NAMES = ("class_names", "client_names", "schema", "backbone")
"""Optional: the original names of classes and clients, and JSON texts of the schema that the features follow and of the
backbone that they come from."""

LARGEST_FEATURE = 1e9  # far below 1e19, where squares overflow float32

# raised by NumPy and zipfile for a truncated or damaged file, or when the disk fails
READ_ERRORS = (
    OSError,
    EOFError,
    KeyError,
    MemoryError,
    RuntimeError,  # for encrypted members; its subclass NotImplementedError for unknown compression
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


EXPANDS_FROM_BYTES = 1 << 30  # less is never refused
MOST_EXPANSION = 200  # features are compressed by a much smaller factor, a file of zeros by about 1000


def check_expansion(path: str, name: str, expanded: int, size: int) -> None:
    """Refuse a part of a file that takes far more memory than space on disk."""
    if expanded > max(EXPANDS_FROM_BYTES, MOST_EXPANSION * size):
        raise UserError(
            f"data file {path}: {name} expands to {expanded:,} bytes, more than {MOST_EXPANSION} times its size"
        )


def sha256(path: str) -> str:
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror or error}") from None


def read_backbone(text: str) -> dict[str, Any]:
    """Parse the description of a backbone in a feature file or a model. Raises ValueError if a part is missing."""
    about = json.loads(text)
    if not isinstance(about, dict) or not isinstance(about.get("details"), dict):
        raise ValueError("its backbone is not described")
    if not all(isinstance(about.get(key), str) for key in ("name", "rows", "column", "label")):
        raise ValueError("its backbone is not described")
    return about


def read_npz(path: str, needs: Sequence[str] = ARRAYS, optional: Sequence[str] = (*OPTIONAL, *NAMES)) -> dict[str, Any]:
    """The needed arrays, and the optional ones that the file has."""
    name = ""
    try:
        with open_file(path) as content:
            start = content.read(6)
            content.seek(0)
            if not start.startswith(b"PK"):
                kind = "a bare array, not" if start == b"\x93NUMPY" else "not"
                raise UserError(
                    f"data file {path} is {kind} an npz archive; tables and arrays are imported with: "
                    f"fedsweep data import FILE --label COLUMN"
                )
            file = np.load(content, allow_pickle=False)  # a pickle could run arbitrary code
            missing = [name for name in needs if name not in file]
            if missing:
                raise UserError(f"data file {path} lacks the array {missing[0]!r}; it needs {', '.join(needs)}")
            assert file.zip is not None  # None once closed
            arrays: dict[str, Any] = {}
            expanded = size = 0
            for name in (*needs, *(name for name in optional if name in file)):
                member = name if name in file.zip.NameToInfo else f"{name}.npy"  # NumPy also reads members without .npy
                info = file.zip.getinfo(member)
                expanded, size = expanded + info.file_size, size + info.compress_size
                check_expansion(path, name, expanded, size)
                streamed = stream_if_large(path, content, info) if name == "x_train" else None
                arrays[name] = file[name] if streamed is None else streamed
                if not isinstance(arrays[name], np.ndarray | StoredRows):
                    raise UserError(f"data file {path}: {name} is not an array")
                if not np.dtype(arrays[name].dtype).itemsize:  # type U0: a header may state any number of rows
                    raise UserError(f"data file {path}: {name} holds nothing")
            return arrays
    except UserError:
        raise
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise UserError(
                f"data file {path}: {name} holds Python objects, which are never loaded; save text with dtype=str"
            ) from None
        raise UserError(f"data file {path} cannot be read as npz: {error}") from None
    except READ_ERRORS as error:
        raise UserError(f"data file {path} is not a complete npz archive: {error}") from None
