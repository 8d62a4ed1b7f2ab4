"""Failures of actors, as exceptions that keep their type on the way through other processes.

Ray cannot pickle its own `ActorDiedError`: raised again in another actor, it arrives as plain text.
"""

from __future__ import annotations

from ray.exceptions import RayActorError


def original(error: BaseException) -> BaseException:
    """The error that was raised; Ray wraps what was raised in another process."""
    while (cause := getattr(error, "cause", None)) is not None:
        error = cause
    return error


def one_line(error: BaseException) -> str:
    """The type of an error, and the line of its text that says most: the last one, but the first one of CUDA's errors,
    to which torch adds advice."""
    error = original(error)
    lines = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    return f"{name}: {lines[0 if name == 'AcceleratorError' else -1].strip()}"


class _NodeError(RuntimeError):
    """`node`: the id of the node, if that is known."""

    def __init__(self, reason: str, node: str = "") -> None:
        super().__init__(reason, node)
        self.reason, self.node = reason, node

    def __str__(self) -> str:
        return self.reason


class HungError(_NodeError):
    """An actor is alive but does not answer."""


class NotStartedError(_NodeError):
    """A slot or its federation could not be started on a node."""


class HostFailedError(_NodeError):
    """A client host has raised an exception that may not occur on another node."""


class NodeExcludedError(RuntimeError):
    """A slot ends because its node gets no more packs; Tune starts it again elsewhere."""


class ActorLostError(RuntimeError):
    """An actor has died, or cannot be reached. `node`: where it was placed, if known."""

    def __init__(self, reason: str, actor_id: str | None, node: str = "") -> None:
        super().__init__(reason, actor_id, node)
        self.reason, self.actor_id, self.node = reason, actor_id, node

    def __str__(self) -> str:
        return self.reason

    @classmethod
    def of(cls, error: RayActorError, node: str = "") -> ActorLostError:
        """The last line of Ray's message has the details; its guesses at the cause are left out."""
        reason = str(error).strip().splitlines()[-1].strip().partition(" Some common causes")[0]
        return cls(reason, error.actor_id, node)
