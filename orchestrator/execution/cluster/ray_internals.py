"""All that fedsweep uses of Ray's private modules, which may change with any minor version: pyproject.toml says which
versions were tested."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ray._private import parameter, ray_constants, services, worker
from ray._private.authentication import authentication_token_setup as tokens
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import actors, available_resources_per_node, jobs

__all__ = [
    "actor_of",
    "actors",
    "available_resources_per_node",
    "canonicalize_bootstrap_address",
    "in_processes_that_wait",
    "instead",
    "jobs",
    "only_what_is_needed",
    "ray_constants",
    "resources_here",
    "session_folder",
    "tokens",
]


def session_folder() -> str:
    """Where the Ray that this process has joined keeps its logs, on every node."""
    return worker.global_worker.node.get_session_dir_path()


def resources_here(object_store_memory: int, memory: int) -> dict[str, float]:
    """What a Ray that starts on this machine finds there; but for the memory, which it would take from what is free at
    the moment."""
    found = ResourceAndLabelSpec(object_store_memory=object_store_memory, memory=memory)
    return found.resolve(is_head=True, node_ip_address="127.0.0.1").to_resource_dict()


def actor_of(trial: Any) -> Any:
    """The actor in which Tune runs a trial."""
    return trial.temporary_state.ray_actor


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While the block runs, Ray finds this under that name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def only_what_is_needed() -> Iterator[None]:
    """A Ray that is started here goes without processes that would each import Ray first: the dashboard, which has no
    page and yet is waited for, the autoscaler, where no node can come, and the reader of logs, which nobody sees."""
    fewer = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
    with (
        instead(parameter, "RayParams", fewer),
        instead(services, "start_api_server", lambda *arguments, **options: (None, None)),
    ):
        yield


def in_processes_that_wait() -> contextlib.AbstractContextManager[None]:
    """Tune gives its actors, and so those that they start, a variable for a library that nobody has here. For actors
    with variables of their own Ray starts processes anew, in two steps, while others that it has started wait."""
    from ray.tune.execution import class_cache

    return instead(class_cache, "DEFAULT_ENV_VARS", {})
