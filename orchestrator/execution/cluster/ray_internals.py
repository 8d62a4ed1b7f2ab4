"""Everything that fedsweep uses of Ray's private modules, which may change with any minor version; pyproject.toml lists
the versions that were tested."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Literal

from ray._common.utils import get_default_system_temp_dir
from ray._private import parameter, ray_constants, services, worker
from ray._private.authentication import authentication_token_setup as tokens
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import actors, available_resources_per_node, jobs, state
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import RpcError
from ray.job_config import JobConfig
from ray.thirdparty_files import psutil

__all__ = [
    "JobConfigWithoutFolders",
    "actor_of",
    "actors",
    "available_resources_per_node",
    "canonicalize_bootstrap_address",
    "dead_local_processes",
    "death_cause",
    "detect_local_resources",
    "draining_nodes",
    "get_default_system_temp_dir",
    "head_answers",
    "jobs",
    "kill_local_ray",
    "minimal_local_ray",
    "own_clusters",
    "patched",
    "psutil",
    "ray_constants",
    "reuse_prestarted_workers",
    "session_folder",
    "tokens",
    "without_error_messages",
]

GCS_OPTION = "--gcs-address="
RAY_PROGRAMS = ("raylet", "gcs_server")


class JobConfigWithoutFolders(JobConfig):
    """Keeps the driver's current folder and the folder of its script out of the workers' `sys.path`: a `torch.py` in
    either would be executed. Ray adds both folders to the front, unless the job has its own working directory."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def session_folder() -> str:
    """Where the connected Ray keeps its logs, on every node."""
    return worker.global_worker.node.get_session_dir_path()


def detect_local_resources(object_store_memory: int, memory: int) -> dict[str, float]:
    """The resources that a Ray started on this machine would detect, with the given memory: Ray itself would use what
    is free at the moment."""
    spec = ResourceAndLabelSpec(object_store_memory=object_store_memory, memory=memory)
    return spec.resolve(is_head=True, node_ip_address="127.0.0.1").to_resource_dict()


def own_clusters() -> set[str | None]:
    """The addresses of the clusters that this user's Ray processes on this machine belong to."""
    found: set[str | None] = set()
    for process in psutil.process_iter(["uids", "cmdline", "exe"]):
        executable = os.path.basename(process.info["exe"] or "")
        if set(process.info["uids"] or ()) == {os.geteuid()} and executable in RAY_PROGRAMS:
            for word in process.info["cmdline"] or ():
                if word.startswith(GCS_OPTION):
                    with contextlib.suppress(ValueError):  # no address
                        found.add(canonicalize_bootstrap_address(word.removeprefix(GCS_OPTION)))
    return found


def head_answers(timeout_s: float) -> bool:
    """Whether the head answers a call in this time. A head that is frozen still accepts connections."""
    try:
        worker.global_worker.gcs_client.internal_kv_get(b"fedsweep", b"fedsweep", timeout=timeout_s)
    except RpcError:
        return False
    return True


def dead_local_processes() -> list[str]:
    """Names of the processes that have died, of a Ray that this process has started."""
    node = worker._global_node
    return [] if node is None else [str(kind) for kind, _ in node.dead_processes()]


def kill_local_ray() -> None:
    """Kill all processes of a Ray that this process has started."""
    with contextlib.suppress(Exception):  # some have died already
        worker._global_node.kill_all_processes(check_alive=False, allow_graceful=False)


def draining_nodes() -> set[str]:
    """The nodes that are about to leave the cluster, for example because a cloud takes them back."""
    return set(state.get_draining_nodes())


def actor_of(trial: Any) -> Any:
    """The actor in which Tune runs a trial."""
    return trial.temporary_state.ray_actor


def death_cause(actor_id: str) -> tuple[Literal["node died", "out of memory", ""], str]:
    """Why an actor died, and the id of its node, as the cluster's head has recorded them."""
    actor = actors(actor_id) or {}
    node = (actor.get("Address") or {}).get("NodeID") or ""
    cause = actor.get("DeathCause")
    if cause is None:
        return "", node
    if cause.HasField("oom_context"):
        return "out of memory", node
    context = cause.actor_died_error_context
    died_with_node = cause.HasField("actor_died_error_context") and context.reason == ActorDiedErrorContext.NODE_DIED
    return "node died" if died_with_node else "", node


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def minimal_local_ray() -> Iterator[None]:
    """A Ray started in this block runs without the dashboard, the autoscaler and the log monitor. A local Ray does not
    need these processes, and each of them imports Ray, which takes time."""
    params = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
    with (
        patched(parameter, "RayParams", params),
        patched(services, "start_api_server", lambda *arguments, **options: (None, None)),
    ):
        yield


def without_error_messages() -> contextlib.AbstractContextManager[None]:
    """Do not let Ray print what its processes report about failures, including pages of their logs: fedsweep reports
    the failures of slots itself."""
    return patched(worker, "print_to_stdstream", lambda *arguments, **options: None)


def reuse_prestarted_workers() -> contextlib.AbstractContextManager[None]:
    """Remove the environment variable that Tune sets for its actors. For actors with their own environment, Ray starts
    new worker processes, in two steps, instead of using those that it has started in advance."""
    from ray.tune.execution import class_cache

    return patched(class_cache, "DEFAULT_ENV_VARS", {})
