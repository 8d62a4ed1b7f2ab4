"""Chooses the kernels of a device: compiled C on a CPU, Triton on a GPU, or plain torch.

The C sources in `c` are compiled on first use with the machine's own compiler, which takes seconds, and cached in the
user's cache folder. Results of different kernels differ in their last bits, so a whole study uses one kind: the driver
chooses it, and a host that cannot provide it fails. By default the driver uses C and Triton where available;
FEDSWEEP_KERNEL=torch selects torch, FEDSWEEP_KERNEL=own requires C and Triton.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal

from trainables.errors import UserError, one_of
from trainables.files import trusted_user_folder
from trainables.models.clipping import SOFTENING
from trainables.models.lanes import SHAPES

SOURCES = Path(__file__).with_name("c")
LANES = SHAPES["cpu"].lanes
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
TILE = 128  # rows whose gradients are summed in float32; determines how sums are rounded
GROUP = 4  # tiles whose gradients are added together; does not change results
# no multiply-adds except explicit ones: both layouts must round the same way
FLAGS = (
    *(f"-DLANES={LANES}", f"-DTILE={TILE}", f"-DGROUP={GROUP}", f"-DSOFTENING={SOFTENING}f"),
    *("-O2", "-march=native", "-fno-math-errno", "-ffp-contract=off"),
)

Kernel = Literal["compiled", "triton", "torch"]
OWN: dict[str, Kernel] = {"cpu": "compiled", "cuda": "triton"}
_chosen: dict[str, Kernel] = {}


def chosen(device: str = "cpu") -> Kernel:
    """The kernel that this process uses."""
    return _chosen.get(device) or _preferred(device)


def choose(kernel: Kernel, device: str = "cpu") -> None:
    """Set the kernel of this process. Raises UserError if it is not available."""
    if kernel != "torch" and not _available(device):
        lacks = "compile C" if device == "cpu" else "import triton"
        raise UserError(
            f"kernel = {kernel!r}: {platform.node()} cannot {lacks}, but the driver can; install what it needs, or run "
            "the study with FEDSWEEP_KERNEL=torch"
        )
    _chosen[device] = kernel


@cache
def _preferred(device: str) -> Kernel:
    asked = os.environ.get("FEDSWEEP_KERNEL", "auto")
    one_of(("auto", "own", "torch"), FEDSWEEP_KERNEL=asked)
    if asked == "torch":
        return "torch"
    if _available(device):
        return OWN[device]
    if asked == "own":
        raise UserError(f"FEDSWEEP_KERNEL = 'own': the kernel {OWN[device]!r} is not available here")
    return "torch"


def _available(device: str) -> bool:
    return library() is not None if device == "cpu" else importlib.util.find_spec("triton") is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None if they cannot be compiled."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        try:
            return _declare(ctypes.CDLL(str(_compile())))
        except OSError:  # the cached file is damaged
            return _declare(ctypes.CDLL(str(_compile(force=True))))
    return None


def _declare(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the C functions."""
    place, number = ctypes.c_void_p, ctypes.c_int64
    found.vector_width.restype = number
    found.gradient_sums.argtypes = [
        *[place] * 4,
        *[number] * 5,
        place,
        *[number] * 3,
        *(place, place, number),
        *[place] * 4,
    ]
    found.evaluation.argtypes = [*[place] * 2, *[number] * 3, place, *[number] * 2, *[place] * 3]
    found.mlp_gradient_sums.argtypes = [
        *[place] * 4,
        *[number] * 6,
        *[place] * 3,
        *[number] * 3,
        *(place, place, number),
        *[place] * 5,
    ]
    found.mlp_evaluation.argtypes = [*[place] * 2, *[number] * 4, *[place] * 2, *[number] * 2, *[place] * 3]
    for function in (found.gradient_sums, found.evaluation, found.mlp_gradient_sums, found.mlp_evaluation):
        function.restype = None
    return found


def _compile(force: bool = False) -> Path:
    """The compiled file, from the cache if it has one for these sources, compiler and processor."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if not os.environ.get("CC") and shutil.which(compiler[0]) is None:
        compiler = ["cc"]  # Python may have been built on a machine with another compiler
    sources = sorted(SOURCES.glob("*.[ch]"))
    texts = (source.read_text(encoding="utf-8") for source in sources)
    identity = "\n".join((*texts, *compiler, *FLAGS, _processor()))
    folder = _cache_folder()
    file = folder / f"heads-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if force or not _is_ours(file):
        c_files = [str(source) for source in sources if source.suffix == ".c"]
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / file.name
            subprocess.run(
                [*compiler, *FLAGS, "-shared", "-fPIC", *c_files, "-o", str(made), "-lm"],
                check=True,
                capture_output=True,
                timeout=120,
            )
            made.chmod(0o755)
            made.replace(file)  # atomic, as other processes may compile at the same time
    return file


def _cache_folder() -> Path:
    """A folder that only this user may write to, because its files are executed: the user's cache folder, or a
    temporary one if there is none or another user can change it."""
    try:
        folder = trusted_user_folder("XDG_CACHE_HOME", ".cache")
    except RuntimeError:
        return _own_folder()
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return _own_folder()
    # only the group can have this permission: `trusted_user_folder` raises if everyone has it
    if status.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
    return folder


@cache
def _own_folder() -> Path:
    """A temporary folder, which is removed when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix="fedsweep-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_ours(file: Path) -> bool:
    """Whether a file exists that only this user can have written."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE


def _processor() -> str:
    """What -march=native depends on: machines of different types may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))}))
