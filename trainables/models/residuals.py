"""From logits to clipped residuals (p - y) * factor, in place: all of a round that is neither matrix product nor noise.

Twice: in torch, for every device and type, and in C for float32 on a CPU, where it takes a quarter of the time. The C
is compiled by the machine's own compiler when it is first wanted (a third of a second) and kept in the user's cache.
Where there is no compiler torch does it all; its last bits differ, so nodes of a cluster should be alike in this:
FEDSWEEP_KERNEL=torch makes them so.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from trainables.models.lanes import SHAPES

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = (f"-DLANES={SHAPES['cpu'].lanes}", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")


class Seen(NamedTuple):
    """What diagnostics are made of, per row and lane."""

    sums: torch.Tensor
    """Of 2 to the shifted logits."""
    label_logits: torch.Tensor
    """The label's shifted logit."""
    factors: torch.Tensor


def clip_residuals(
    z: torch.Tensor, label: torch.Tensor, row_norm: torch.Tensor, clip: torch.Tensor, diagnose: bool = False
) -> Seen | None:
    """`z` is (clients, rows, classes, lanes), logits to base 2; `label` (clients, rows), `row_norm` (clients, rows, 1),
    `clip` (lanes,)."""
    compiled = _compiled() if z.device.type == "cpu" and z.dtype == torch.float32 else None
    if compiled is None:
        return _in_torch(z, label, row_norm, clip, diagnose)
    seen = Seen(*torch.empty(3, *z.shape[:2], z.shape[3])) if diagnose else None
    given = (z, label, row_norm)
    # a part of the rows of several clients is not in one piece: then client by client
    together = all(part.is_contiguous() for part in given)
    for i in [slice(None)] if together else range(z.shape[0]):
        into = [part[i] for part in seen] if seen else [None] * 3
        places = [part if part is None else _pointer(part) for part in (*(part[i] for part in given), clip, *into)]
        compiled(*places[:4], label[i].numel(), z.shape[2], *places[4:])
    return seen


def _in_torch(
    z: torch.Tensor, y: torch.Tensor, row_norm: torch.Tensor, clip: torch.Tensor, diagnose: bool
) -> Seen | None:
    label = y.view(*y.shape, 1, 1).expand(-1, -1, 1, z.shape[3])
    z.sub_(z.amax(2, keepdim=True))
    label_logits = z.gather(2, label).squeeze(2) if diagnose else None
    z.exp2_()
    inverse = z.gather(2, label).squeeze(2)
    z.scatter_(2, label, 0)
    others = z.sum(2)
    inverse.add_(others)
    sums = inverse.clone() if diagnose else None
    inverse.reciprocal_()
    # ||p - y||^2 = sum of p_k^2 over the other classes + (1 - p_y)^2, and 1 - p_y is the sum of those p_k:
    # no difference is taken, so the norm is right however sure the model is of the label
    norm = (z * z).sum(2).addcmul_(others, others)
    norm.sqrt_().mul_(inverse).mul_(row_norm)
    factors = torch.div(clip, norm, out=norm).clamp_(max=1)
    z.scatter_(2, label, others.neg_().unsqueeze(2))
    z.mul_(inverse.mul_(factors).unsqueeze(2))
    return Seen(sums, label_logits, factors) if sums is not None and label_logits is not None else None


# ---- the compiled one


@cache
def _compiled() -> ctypes._NamedFuncPointer | None:
    if os.environ.get("FEDSWEEP_KERNEL") == "torch":
        return None
    try:
        library = _library()
    except (OSError, subprocess.SubprocessError):
        return None
    function = ctypes.CDLL(str(library)).clipped_residuals
    function.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3]
    function.restype = None
    return function


def is_compiled() -> bool:
    """Whether this machine runs the compiled one."""
    return _compiled() is not None


def _library() -> Path:
    """The compiled file; from the cache, if it is there for this source and this kind of processor."""
    identity = hashlib.sha256("\n".join((SOURCE.read_text(encoding="utf-8"), *FLAGS, _processor())).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsweep"
    file = folder / f"residuals-{identity.hexdigest()[:16]}.so"
    if not file.is_file():
        compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / file.name
            command = [shutil.which(compiler) or "cc", *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            made.replace(file)  # whole or not at all, whoever else is at it
    return file


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))}))


def _pointer(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the compiled kernel wants neighbouring numbers")
    return tensor.data_ptr()
