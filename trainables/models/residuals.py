"""From logits to clipped residuals (p - y) * factor, in place: all of a round that is neither matrix product nor noise.

Twice: in torch, for every device and type, and in C for float32 on a CPU, where it takes a quarter of the time. The C
is compiled by the machine's own compiler when it is first wanted (a third of a second) and kept in the user's cache.
Their last bits differ, so a study keeps to one of them: the driver says which, and a host that cannot follow fails.
FEDSWEEP_KERNEL=torch (or compiled) says it to the driver; else it compiles where there is a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from trainables.errors import UserError, one_of
from trainables.models.lanes import SHAPES

SOURCE = Path(__file__).with_suffix(".c")
LANES = SHAPES["cpu"].lanes
FLAGS = (f"-DLANES={LANES}", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")


Kernel = Literal["compiled", "torch"]
KERNELS: tuple[Kernel, ...] = ("compiled", "torch")


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
    fits = z.device.type == "cpu" and z.dtype == torch.float32 and z.shape[3] == LANES
    compiled = _compiled() if fits and chosen() == "compiled" else None
    if compiled is None:
        return _in_torch(z, label, row_norm, clip, diagnose)
    clients, rows, classes, lanes = z.shape
    _check("label", label, torch.int64, (clients, rows))
    _check("row_norm", row_norm, torch.float32, (clients, rows, 1))
    _check("clip", clip, torch.float32, (lanes,))
    seen = Seen(*torch.empty(3, clients, rows, lanes)) if diagnose else None
    given = (z, label, row_norm)
    # a part of the rows of several clients is not in one piece: then client by client
    together = all(part.is_contiguous() for part in given)
    for i in [slice(None)] if together else range(clients):
        into = [part[i] for part in seen] if seen else [None] * 3
        places = [part if part is None else _pointer(part) for part in (*(part[i] for part in given), clip, *into)]
        compiled(*places[:4], label[i].numel(), classes, *places[4:])
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


# ---- which one


_chosen: Kernel | None = None


def chosen() -> Kernel:
    """The one this process uses."""
    return _chosen or _preferred()


def choose(kernel: Kernel) -> None:
    """For this process, from now on; an error, if it cannot."""
    global _chosen
    if kernel == "compiled" and _compiled() is None:
        raise UserError(
            f"kernel = 'compiled': {platform.node()} cannot compile {SOURCE.name}, as the driver can; give it a C "
            "compiler, or run the study with FEDSWEEP_KERNEL=torch"
        )
    _chosen = kernel


@cache
def _preferred() -> Kernel:
    asked = os.environ.get("FEDSWEEP_KERNEL", "auto")
    one_of(("auto", *KERNELS), FEDSWEEP_KERNEL=asked)
    if asked == "torch" or _compiled() is None:
        if asked == "compiled":
            raise UserError(f"FEDSWEEP_KERNEL = 'compiled': {SOURCE.name} cannot be compiled here")
        return "torch"
    return "compiled"


# ---- the compiled one


@cache
def _compiled() -> ctypes._NamedFuncPointer | None:
    with contextlib.suppress(OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        try:
            library = ctypes.CDLL(str(_library()))
        except OSError:  # a damaged one in the cache
            library = ctypes.CDLL(str(_library(anew=True)))
        function = library.clipped_residuals
        function.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3]
        function.restype = None
        return function
    return None


def _library(anew: bool = False) -> Path:
    """The compiled file; from the cache, if it is there for this source, compiler and kind of processor."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if not os.environ.get("CC") and shutil.which(compiler[0]) is None:
        compiler = ["cc"]  # Python's own may have been built elsewhere
    identity = "\n".join((SOURCE.read_text(encoding="utf-8"), *compiler, *FLAGS, _processor()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsweep"
    file = folder / f"residuals-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if anew or not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / file.name
            subprocess.run(
                [*compiler, *FLAGS, str(SOURCE), "-o", str(made)], check=True, capture_output=True, timeout=60
            )
            made.replace(file)  # whole or not at all, whoever else is at it
    return file


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))}))


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """C takes what it is pointed at for what it expects: a bound of another type would be no bound."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not {dtype} {shape}")


def _pointer(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the compiled kernel wants neighbouring numbers")
    return tensor.data_ptr()
