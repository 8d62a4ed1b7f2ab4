"""`fedsweep doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata

import typer

from orchestrator.commands.options import Json
from orchestrator.console import show
from orchestrator.version import version

OPTIONAL = ("s3fs", "mlflow", "wandb", "optuna-dashboard", "timm")
REQUIRED = (
    *("ray", "torch", "numpy", "scipy", "pandas", "matplotlib", "optuna", "pydantic", "pyyaml", "typer", "rich"),
    *("dp-accounting", "fsspec", "pooch", "requests", "pyarrow", "pillow"),
)
REQUIRED_MEMORY = 4 << 30


def doctor(json: Json = False) -> None:
    """Check versions, memory, GPUs and compiler. Exits with 1 if something required is missing."""
    checks = list(_checks())
    show(
        [{"check": name, "value": text, "ok": ok} for name, text, ok in checks],
        json,
        [f"{'' if ok else 'PROBLEM: '}{name:<14}{text}" for name, text, ok in checks],
    )
    if not all(ok for _, _, ok in checks):
        raise typer.Exit(1)


def _checks() -> Iterator[tuple[str, str, bool]]:
    yield "fedsweep", version(), True
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", True
    for name in REQUIRED:
        yield name, *_version(name)
    import torch

    from trainables.federation.machine_memory import machine_bytes

    memory = machine_bytes()
    enough = memory >= REQUIRED_MEMORY
    yield "memory", f"{memory / 2**30:.1f} GiB" + ("" if enough else "; a sweep needs 4"), enough
    yield "cores", str(os.cpu_count()), True
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(gpus) or "none; sweeps run on the CPU", True
    yield "compiler", _compiler(), True
    free = shutil.disk_usage(".").free
    yield "disk", f"{free / 2**30:.1f} GiB free in this folder", free > 1 << 30
    writable = os.access(os.path.expanduser("~"), os.W_OK)
    yield "home", "writable" if writable else "not writable; Ray stores a token there (RAY_AUTH_TOKEN_PATH)", writable
    installed = [name for name in OPTIONAL if _version(name)[1]]
    yield "extras", ", ".join(installed) or "none", True
    from trainables import plugins

    yield "plug-ins", ", ".join(plugins.loaded()) or "none", True


def _version(name: str) -> tuple[str, bool]:
    try:
        return metadata.version(name), True
    except metadata.PackageNotFoundError:
        return "not installed", False


def _compiler() -> str:
    from trainables.models import kernels

    if kernels.chosen() == "compiled":
        return "works; the compiled kernel is used"
    return "none that works; the torch kernel is used, which takes 1.6 times as long"
