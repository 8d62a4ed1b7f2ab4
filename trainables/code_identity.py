"""Identifies the code that computes results. A node with other code would change results without any error."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from trainables import plugins

PACKAGE = Path(__file__).parent
SOURCES = (".py", ".c", ".h")
LIBRARIES = ("torch", "numpy", "scipy")
CodeIdentity = Mapping[str, str]
"""The version or hash of everything that can change a result, by name."""


class OtherCodeError(RuntimeError):
    """This process has other code than the driver. `node`: its node's id."""

    def __init__(self, differences: str, node: str) -> None:
        super().__init__(differences, node)
        self.differences, self.node = differences, node

    def __str__(self) -> str:
        return f"other code than the driver: {self.differences}"


def package_identity() -> CodeIdentity:
    """The identity of this process's code, without plug-ins."""
    versions = {name: metadata.version(name).partition("+")[0] for name in LIBRARIES}
    return {"package trainables": _hash_of_package(), **versions, "processor": platform.machine()}


def code_identity(kernel: str) -> CodeIdentity:
    """The identity of this process's code, with its plug-ins and the build of its kernel."""
    plugins.load_all()
    loaded = {f"plug-in {name}": plugins.code_hash(name) for name in plugins.loaded()}
    return {**package_identity(), "kernel": kernel, **loaded}


def accelerator_name(device: str) -> str:
    """The model of the GPU that this process uses, as torch names it; empty on a CPU."""
    if device == "cpu":
        return ""
    import torch

    return torch.cuda.get_device_name()


def digest(identity: CodeIdentity, accelerator: str = "") -> str:
    """Hash of the code identity and of the name of the accelerator."""
    text = "\n".join(f"{name} {value}" for name, value in sorted({**identity, "accelerator": accelerator}.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(expected: CodeIdentity, found: CodeIdentity) -> str:
    """The differences as part of a sentence; empty if there are none."""
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return ", ".join(
        f"{name} is {found.get(name, 'missing')} instead of {expected.get(name, 'missing')}" for name in names
    )


def check(expected: CodeIdentity, found: CodeIdentity, node: str) -> None:
    """Raise if anything in `found` differs; what only `expected` has is not compared."""
    if different := differences({name: expected.get(name, "missing") for name in found}, found):
        raise OtherCodeError(different, node)


@cache
def _hash_of_package() -> str:
    """Cached at the first call: this process keeps the hash if a file is edited later."""
    content = hashlib.sha256()
    for file in sorted(path for path in PACKAGE.rglob("*") if path.suffix in SOURCES):
        content.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return content.hexdigest()[:16]
