"""Features that stay on disk: rows are read from the file block by block, never the whole table at once.

For data sets larger than a node's memory. The file is an uncompressed npz (`np.savez`) at a path that all nodes can
read, or at a URL.
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
from trainables.files import open_plain
from trainables.urls import as_user_error, is_local, open_filesystem, shown_url

STREAM_FROM_BYTES = int(os.environ.get("FEDSWEEP_STREAM_FROM_MB", "1024")) << 20
"""Uncompressed tables of at least this size are not loaded into memory."""
BLOCK_BYTES = 16 << 20
SPARSE_FROM_BYTES = 1 << 30  # smaller files are never refused
MOST_SPARSE = 200
"""A larger file may be at most this many times as large as its space on disk."""
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member; ends with the lengths of the name and the extra field


def open_file(source: str) -> IO[bytes]:
    """Open a file at a path or URL. A local file must be a regular file and must not consist mostly of holes."""
    if "://" not in source:
        return _not_sparse(open_plain(Path(source), follow=True), source)
    files, path = open_filesystem(source)
    return _not_sparse(open_plain(Path(path), follow=True), source) if is_local(files) else files.open(path, "rb")


def _not_sparse(file: IO[bytes], source: str) -> IO[bytes]:
    """Refuse a file that consists mostly of holes, which take no space on disk and are read as zeros."""
    status = os.fstat(file.fileno())
    if status.st_size > max(SPARSE_FROM_BYTES, MOST_SPARSE * 512 * status.st_blocks):
        file.close()
        raise UserError(f"data {source} is almost empty: of its {status.st_size:,} bytes most are holes")
    return file


@dataclass(frozen=True)
class StoredRows:
    """Features on disk. Selecting rows by index reads them as a float32 array (rows, features)."""

    source: str
    size: int
    """File size when the data was validated."""
    offset: int
    """Where the table begins in the file."""
    shape: tuple[int, int]
    dtype: str
    """Number type in the file."""

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Size as float32."""
        return 4 * self.shape[0] * self.shape[1]

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.parts([rows])[0]

    def parts(self, clients: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        """The rows of several clients, in one pass that skips blocks without a requested row."""
        parts = [np.empty((len(rows), self.shape[1]), np.float32) for rows in clients]
        with as_user_error(f"data {self.source} cannot be read"), open_file(self.source) as file:
            if file.seek(0, os.SEEK_END) != self.size:
                raise UserError(f"data {shown_url(self.source)} has changed since the study began")
            for first in range(0, len(self), self._block_rows):
                inside = [np.flatnonzero((rows >= first) & (rows < first + self._block_rows)) for rows in clients]
                requested = np.concatenate([rows[at] for rows, at in zip(clients, inside, strict=True)])
                if len(requested):
                    low = int(requested.min())
                    block = self._read(file, low, int(requested.max()) + 1)
                    for part, rows, at in zip(parts, clients, inside, strict=True):
                        part[at] = block[rows[at] - low]
        return parts

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """The whole table block by block, in its own number type: (first row, block)."""
        with as_user_error(f"data {self.source} cannot be read"), open_file(self.source) as file:
            for first in range(0, len(self), self._block_rows):
                yield first, self._read(file, first, min(len(self), first + self._block_rows))

    @cached_property
    def _row_bytes(self) -> int:
        return self.shape[1] * np.dtype(self.dtype).itemsize

    @cached_property
    def _block_rows(self) -> int:
        return max(1, BLOCK_BYTES // self._row_bytes)

    def _read(self, file: IO[bytes], low: int, high: int) -> NDArray[Any]:
        file.seek(self.offset + low * self._row_bytes)
        content = file.read((high - low) * self._row_bytes)
        return np.frombuffer(content, self.dtype).reshape(high - low, self.shape[1])


def stream_if_large(source: str, file: IO[bytes], info: zipfile.ZipInfo) -> StoredRows | None:
    """A member of an npz archive as `StoredRows`, if it is large and can be read block by block. None also for a
    malformed array: reading it whole reports what is wrong."""
    if info.file_size < STREAM_FROM_BYTES or info.compress_type != zipfile.ZIP_STORED:
        return None
    size = file.seek(0, os.SEEK_END)
    file.seek(info.header_offset)
    header = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    file.seek(header[-2] + header[-1], os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read_header(file)
    if fortran_order or len(shape) != 2 or 0 in shape or dtype.kind not in "fiub":
        return None
    source = source if "://" in source else os.path.abspath(source)  # workers have another current folder
    rows = StoredRows(source, size, file.tell(), (int(shape[0]), int(shape[1])), dtype.str)
    return rows if rows.offset + len(rows) * rows._row_bytes <= size else None
