"""Backends run the packs of a sweep: on Ray, or in this process."""

from __future__ import annotations

from orchestrator.execution.backends.base import Backend
from trainables.errors import UserError, one_of

BACKENDS = ("ray", "local")


def get(name: str, address: str | None = None) -> Backend:
    """`address`: of a Ray cluster."""
    one_of(BACKENDS, backend=name)
    if name == "local":
        if address is not None:
            raise UserError(f"address = {address!r}: the local backend runs in this process and joins no cluster")
        from orchestrator.execution.backends.local import LocalBackend

        return LocalBackend()
    from orchestrator.execution.backends.ray import RayBackend  # imports Ray

    return RayBackend(address)
