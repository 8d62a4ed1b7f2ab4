"""Starts a local Ray or joins a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Ray reads these when it is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "1")

import ray
from ray.exceptions import AuthenticationError

from orchestrator.console import stderr
from trainables import plugins
from trainables.errors import UserError
from trainables.federation.machine_memory import machine_bytes
from trainables.files import replaceable_part

MEMORY_SHARE = 0.7  # of the machine, as Ray's own default
LOCAL_OBJECT_STORE = 1 << 30  # bytes; features are megabytes, weights kilobytes


@contextlib.contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[None]:
    """While the block runs, this process is connected to the Ray at `address` (`auto` or HOST:PORT), or else to a local
    one that ends with the block. If it is connected already, nothing changes."""
    if ray.is_initialized():
        yield
        return
    try:
        # an interrupt may crash a local Ray that is starting; the start takes seconds, so Ctrl-C waits until it is over
        with _handle_interrupt(immediately=address is not None):
            if address is None:
                _start(cpus)
            else:
                _join(address)
    except KeyboardInterrupt:
        ray.shutdown()
        raise
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _handle_interrupt(immediately: bool) -> Iterator[None]:
    """After Ctrl-C in the block, raise KeyboardInterrupt at its end. With `immediately`, or after a second Ctrl-C,
    raise it at once; if Ray swallows that exception, it is raised again at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = []

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        if immediately or len(interrupts) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if not interrupts:  # after Ctrl-C, this is Ray's reaction to it
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _start(cpus: int | None) -> None:
    """Start a Ray that listens on the loopback interface only and requires the user's token."""
    from orchestrator.execution.cluster.listening import listening, reachable_from_outside
    from orchestrator.execution.cluster.private_folder import private_folder
    from orchestrator.execution.cluster.ray_internals import JobConfigWithoutFolders, minimal_local_ray

    _make_token()
    folder = private_folder() / "r"  # a folder inside: Ray makes its own folder readable by all users
    before = listening()
    try:
        with _loopback_only(), minimal_local_ray(), _in_folder(folder.parent):
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=LOCAL_OBJECT_STORE,
                job_config=JobConfigWithoutFolders(),
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
            )
    except Exception as error:  # Ray raises plain exceptions
        ray.shutdown()
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise UserError(
            f"Ray did not start on this machine: {reason}; if the machine is busy, try the same command again later"
        ) from error
    if exposed := reachable_from_outside(listening() - before):
        ray.shutdown()
        raise UserError(
            f"the local Ray {ray.__version__} was stopped: it listens on {', '.join(map(str, exposed))}, which other "
            "machines may reach; install a version of Ray that fedsweep supports"
        )


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Processes that are started in this block have this folder as current folder. Python and libraries look for code
    and settings in the current folder, and other users may be able to write to the current folder of this process."""
    from trainables.files import FOLDER, current_folder

    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    variables = {
        FOLDER: str(current_folder()),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in places if place),
    }
    before = {name: os.environ.get(name) for name in variables}
    here = os.open(".", os.O_PATH)
    os.environ.update(variables)
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(here)
        os.close(here)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _join(address: str) -> None:
    """Connect to a running cluster."""
    if "://" in address:
        raise UserError(
            f"address = {address!r} is not auto or HOST:PORT; from outside a cluster, send the command to it: "
            "ray job submit -- fedsweep run STUDY --results URL"
        )
    from orchestrator.execution.cluster.ray_internals import JobConfigWithoutFolders

    try:
        resolved = _resolve(address)
        _check_reachable(resolved)
        _send_token()
        config = JobConfigWithoutFolders()
        ray.init(
            address=resolved, log_to_driver=False, logging_level=logging.ERROR, job_config=config, **_with_plugins()
        )
    except (ConnectionError, OSError, ValueError, AuthenticationError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(
            f"no Ray cluster answers at address = {address!r}: {reason}; to join a cluster you need its token, in "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None


def _with_plugins() -> dict[str, Any]:
    """Pass the plug-ins' variables to the workers, which do not inherit the environment of this process."""
    variables = plugins.environment()
    return {"runtime_env": {"env_vars": variables}} if variables else {}


def _resolve(address: str) -> str:
    """The address as HOST:PORT. For `auto` without RAY_ADDRESS, Ray takes it from a file that every user of this
    machine can write, or from the command lines of all users' processes. The cluster there would get this user's token,
    so `_is_own` must hold."""
    from orchestrator.execution.cluster.ray_internals import canonicalize_bootstrap_address

    resolved = canonicalize_bootstrap_address(address)
    if resolved is None:
        raise ConnectionError("no cluster is running here")
    if address != "auto" or os.environ.get("RAY_ADDRESS", "") not in ("", "auto"):
        return resolved
    if not _is_own(resolved):
        raise UserError(
            f"address = 'auto' names the Ray cluster at {resolved}, but neither you nor root has started its head on "
            f"this machine, and you have started no node of it; if you trust that cluster, say --address {resolved}"
        )
    return resolved


def _is_own(address: str) -> bool:
    """Whether the head at this address is on this machine and belongs to this user or to root, or whether this user has
    started a node of its cluster here. The arguments of root's processes are no proof: any user can start a program
    that runs as root, such as passwd, under any name."""
    from orchestrator.execution.cluster.listening import owners_of
    from orchestrator.execution.cluster.ray_internals import own_clusters

    owners = owners_of(address)
    return (bool(owners) and owners <= {0, os.geteuid()}) or address in own_clusters()


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at the address; Ray would retry for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(f"{address} cannot be reached: {error.strerror or error}") from None


def _loopback_only() -> contextlib.AbstractContextManager[None]:
    """Disable clusters of several machines. Otherwise, on Linux, Ray replaces 127.0.0.1 by the machine's network
    address and listens on all interfaces."""
    from orchestrator.execution.cluster.ray_internals import patched, ray_constants

    return patched(ray_constants, "ENABLE_RAY_CLUSTER", False)


def _make_token() -> None:
    """Create the user's token, readable by the user only. Ray would create it on first use, readable by everyone."""
    from orchestrator.execution.cluster.ray_internals import tokens

    logging.getLogger(tokens.__name__).setLevel(logging.ERROR)
    _check_token()
    before = os.umask(0o077)
    try:
        tokens.enable_token_auth_by_default()
        tokens.ensure_token_if_auth_enabled()
    except OSError as error:
        raise UserError(f"Ray's token cannot be written: {error}; set its location with RAY_AUTH_TOKEN_PATH") from None
    finally:
        os.umask(before)
    _check_token()  # Ray may have created the token's folder


def _check_token() -> None:
    """Refuse a token that another user may have chosen, for example with an inherited $HOME: that user could run code
    in this Ray. Remove the permissions of other users, in case another program created the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    token = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if (other := replaceable_part(token)) is not None:
        raise UserError(f"Ray's token {token}: another user can replace {other}; set HOME to a folder of your own")
    if not named and (token.is_symlink() or token.parent.is_symlink()):
        raise UserError(f"{token} is behind a symbolic link: set RAY_AUTH_TOKEN_PATH to the place of Ray's token")
    with contextlib.suppress(FileNotFoundError):
        status = token.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
            token.chmod(0o600)
            stderr.print(f"note: Ray's token {token} was readable by other users; it is private now")


def _send_token() -> None:
    """Let Ray send the user's token to any address; by default it does so only for the address `auto`."""
    from orchestrator.execution.cluster.ray_internals import tokens

    logging.getLogger(tokens.__name__).setLevel(logging.ERROR)
    _check_token()
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def local_resources() -> list[dict[str, float]]:
    """The resources that a local Ray would have, as a list of one node."""
    from orchestrator.execution.cluster.ray_internals import detect_local_resources

    return [detect_local_resources(LOCAL_OBJECT_STORE, int(MEMORY_SHARE * machine_bytes()))]
