"""All that fedsweep uses of Ray's private modules, which may change with any minor version: pyproject.toml says which
versions were tested."""

from typing import Any

from ray._private import ray_constants, worker
from ray._private.authentication import authentication_token_setup as tokens
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import actors, available_resources_per_node, jobs

__all__ = [
    "actor_of",
    "actors",
    "available_resources_per_node",
    "canonicalize_bootstrap_address",
    "jobs",
    "ray_constants",
    "session_folder",
    "tokens",
]


def session_folder() -> str:
    """Where the Ray that this process has joined keeps its logs, on every node."""
    return worker.global_worker.node.get_session_dir_path()


def actor_of(trial: Any) -> Any:
    """The actor in which Tune runs a trial."""
    return trial.temporary_state.ray_actor
