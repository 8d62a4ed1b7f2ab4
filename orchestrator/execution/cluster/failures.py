"""Why a slot failed: from the types of exceptions and from Ray's records of dead actors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayActorError

from orchestrator.execution.cluster import ray_internals
from trainables.code_identity import OtherCodeError
from trainables.federation.memory_errors import is_out_of_memory
from trainables.federation.messages import Failure
from trainables.ray_actors.errors import (
    ActorLostError,
    HostFailedError,
    NodeExcludedError,
    NotStartedError,
    one_line,
    original,
)


def failure_of(trial: Any) -> Failure:
    """The last failure of a slot, a Tune trial."""
    error: BaseException | None = None
    with contextlib.suppress(OSError, TypeError):  # Tune has recorded no error
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return failure_from(error)


def failure_from(error: BaseException | None) -> Failure:
    if error is None:
        return Failure("its process ended without an error message")
    out_of_memory, error = is_out_of_memory(error), original(error)
    if isinstance(error, RayActorError):
        error = ActorLostError.of(error)
    if isinstance(error, ActorLostError):
        kind, node = ray_internals.death_cause(error.actor_id) if error.actor_id else ("", "")
        return Failure(error.reason[:500], kind or "error", node or error.node)
    if isinstance(error, NodeExcludedError):
        return Failure("its node gets no more packs", "left")
    if isinstance(error, OtherCodeError):
        return Failure(error.differences[:500], "other code", error.node)
    if isinstance(error, NotStartedError | HostFailedError):
        return Failure(error.reason[:500], node=error.node)
    return Failure(one_line(error)[:500], "out of memory" if out_of_memory else "error", getattr(error, "node", ""))
