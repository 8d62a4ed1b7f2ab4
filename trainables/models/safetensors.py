"""Safetensors files: arrays by name and text as metadata, without code. Any reader of the format loads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from trainables.errors import UserError
from trainables.files import PRIVATE, PUBLIC, open_plain, replacing

LONGEST_HEADER = 100_000_000  # bytes, as in the format's own reader
NAMES = {
    **{torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.bool: "BOOL"},
    **{torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"},
}


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a file."""
    with open_plain(path, follow=True) as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            found = json.loads(file.read(size))["__metadata__"] if 0 < size <= LONGEST_HEADER else None
            if isinstance(found, dict):
                return found
        except (KeyError, TypeError, ValueError, RecursionError):
            pass
    raise UserError(f"{path} is not a safetensors file with metadata")


def write(path: Path, arrays: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, private: bool) -> None:
    """Atomic; an existing file is replaced."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    parts, end = [], 0
    for name, value in arrays.items():
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        start, end = end, end + len(content)
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
        parts.append(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path, mode=PRIVATE if private else PUBLIC) as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
