"""A table that stays in its file: clients' rows are read where they lie, a block at a time, and never all of them.

For data that are larger than a node's memory. The file is an npz whose arrays are not compressed (`np.savez`), on a
disk that all nodes see or at a URL.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.urls import as_user_error, open_filesystem

STREAM_FROM_BYTES = int(os.environ.get("FEDSWEEP_STREAM_FROM_MB", "1024")) << 20
"""Tables from this size on are left where they are."""
BLOCK = 16 << 20
"""Bytes that are read at a time."""
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a member of a zip archive; its name and more come behind


def open_file(source: str) -> IO[bytes]:
    if "://" not in source:
        return Path(source).open("rb")
    files, path = open_filesystem(source)
    return files.open(path, "rb")


@dataclass(frozen=True)
class StoredRows:
    """Stands where a float32 array of rows x features would, as far as rows are picked from it."""

    source: str
    size: int
    """Of the file when it was checked."""
    offset: int
    shape: tuple[int, int]
    stored: str
    """The type of the numbers in the file."""

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """As float32."""
        return 4 * self.shape[0] * self.shape[1]

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.parts([rows])[0]

    def parts(self, wanted: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        """Several clients' rows, in one pass over the file that leaves out what nobody wants."""
        found = [np.empty((len(rows), self.shape[1]), np.float32) for rows in wanted]
        with as_user_error(f"data {self.source} cannot be read"), open_file(self.source) as file:
            if file.seek(0, os.SEEK_END) != self.size:
                raise UserError(f"data {self.source} has changed since the study began")
            for first in range(0, len(self), self._rows_at_once):
                inside = [np.flatnonzero((rows >= first) & (rows < first + self._rows_at_once)) for rows in wanted]
                here = np.concatenate([rows[at] for rows, at in zip(wanted, inside, strict=True)])
                if len(here):
                    low = int(here.min())
                    block = self._read(file, low, int(here.max()) + 1)
                    for out, rows, at in zip(found, wanted, inside, strict=True):
                        out[at] = block[rows[at] - low]
        return found

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All of it as it is stored, from which row on."""
        with open_file(self.source) as file:
            for first in range(0, len(self), self._rows_at_once):
                yield first, self._read(file, first, min(len(self), first + self._rows_at_once))

    @cached_property
    def _row_bytes(self) -> int:
        return self.shape[1] * np.dtype(self.stored).itemsize

    @cached_property
    def _rows_at_once(self) -> int:
        return max(1, BLOCK // self._row_bytes)

    def _read(self, file: IO[bytes], low: int, high: int) -> NDArray[Any]:
        file.seek(self.offset + low * self._row_bytes)
        content = file.read((high - low) * self._row_bytes)
        return np.frombuffer(content, self.stored).reshape(high - low, self.shape[1])


def stream_if_large(source: str, file: IO[bytes], info: zipfile.ZipInfo) -> StoredRows | None:
    """An array of an npz archive, where it is large and can be read in parts."""
    if info.file_size < STREAM_FROM_BYTES or info.compress_type != zipfile.ZIP_STORED:
        return None
    size = file.seek(0, os.SEEK_END)
    file.seek(info.header_offset)
    header = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    file.seek(header[-2] + header[-1], os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_column, kind = read_header(file)
    if by_column or len(shape) != 2 or kind.kind not in "fiub":
        return None
    found = StoredRows(source, size, file.tell(), (int(shape[0]), int(shape[1])), kind.str)
    if 0 in shape or found.offset + len(found) * found._row_bytes > size:
        return None  # whoever reads it whole says what is wrong with it
    return found
