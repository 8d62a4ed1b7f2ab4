"""`fedsweep doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata

import typer

from orchestrator.commands.options import Json
from orchestrator.console import emit_json

OPTIONAL = ("s3fs", "mlflow", "wandb", "optuna-dashboard", "timm")
NEEDED = (
    *("ray", "torch", "numpy", "scipy", "pandas", "matplotlib", "optuna", "pydantic", "pyyaml", "typer", "rich"),
    *("dp-accounting", "fsspec", "pooch", "requests", "pyarrow"),
)
LEAST_MEMORY = 4 << 30


def doctor(json: Json = False) -> None:
    """Say what fedsweep finds on this machine and what is missing; exit with 1 if something it needs is."""
    found = list(_examined())
    if json:
        emit_json([{"what": what, "found": text, "fine": fine} for what, text, fine in found])
    else:
        for what, text, fine in found:
            typer.echo(f"{'' if fine else 'PROBLEM: '}{what:<14}{text}")
    if not all(fine for _, _, fine in found):
        raise typer.Exit(1)


def _examined() -> Iterator[tuple[str, str, bool]]:
    yield "fedsweep", metadata.version("fedsweep"), True
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", True
    for name in NEEDED:
        yield name, *_version(name)
    import torch

    from orchestrator.execution.host_memory import machine_bytes

    memory = machine_bytes()
    enough = memory >= LEAST_MEMORY
    yield "memory", f"{memory / 2**30:.1f} GiB" + ("" if enough else ", and a sweep wants 4"), enough
    yield "cores", str(os.cpu_count()), True
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(gpus) or "none: sweeps run on the CPU", True
    yield "compiler", _compiler(), True
    yield "disk", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free here", shutil.disk_usage(".").free > 1 << 30
    writable = os.access(os.path.expanduser("~"), os.W_OK)
    yield "home", "writable" if writable else "not writable: Ray keeps its token there (RAY_AUTH_TOKEN_PATH)", writable
    there = [name for name in OPTIONAL if _version(name)[1]]
    yield "extras", ", ".join(there) or "none", True
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
        return "there: the compiled kernel is used"
    return "none that works: torch computes instead, 1.6 times as long"
