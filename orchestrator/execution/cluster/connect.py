"""Starting a local Ray, or joining one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

# Ray reads these when it is imported: no usage report, no progress tables of its own, no metrics agent
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "1")

import ray
from ray.exceptions import AuthenticationError

from trainables import plugins
from trainables.errors import UserError

LOCAL_OBJECT_STORE = 1 << 30  # bytes; features are megabytes, weights kilobytes


@contextlib.contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[None]:
    """A Ray to run on: the one at `address` (`auto` or HOST:PORT), else a local one that ends with the block."""
    if ray.is_initialized():
        yield
        return
    try:
        # half a Ray that was started here may crash as it ends, and a whole one is there soon
        with _interrupts_heard(at_once=address is not None):
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
def _interrupts_heard(at_once: bool) -> Iterator[None]:
    """A Ctrl-C that comes meanwhile, at once or at the end; a second one in any case at once. Ray may swallow the
    exception: then it is raised again at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = []

    def interrupt(number: int, frame: object) -> None:
        heard.append(number)
        if at_once or len(heard) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if not heard:
            raise  # or else it is what Ray made of the interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def _start(cpus: int | None) -> None:
    """A Ray that nobody else can reach: it listens to this machine alone, and only to those with the user's token."""
    from orchestrator.execution.cluster.ray_internals import minimal_local_ray

    _make_token()
    try:
        with _loopback_only(), minimal_local_ray():
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=LOCAL_OBJECT_STORE,
                _node_ip_address="127.0.0.1",
            )
    except Exception as error:  # of whatever kind: Ray says only in words what went wrong
        ray.shutdown()
        said = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise UserError(
            f"Ray did not start on this machine: {said}; where that is busy with other work, the same command may "
            "succeed a little later"
        ) from error


def _join(address: str) -> None:
    if "://" in address:
        raise UserError(
            f"address = {address!r} is not auto or HOST:PORT; from outside a cluster, send the command to it: "
            "ray job submit -- fedsweep run STUDY --results URL"
        )
    _show_token()
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **_with_plugins())
    except (ConnectionError, OSError, ValueError, AuthenticationError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(
            f"no Ray cluster answers at address = {address!r}: {reason}; one that is up wants its token, from "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None


def _with_plugins() -> dict[str, Any]:
    """Workers of a cluster that is there already do not inherit what this process was told."""
    names = os.environ.get(plugins.VARIABLE)
    return {"runtime_env": {"env_vars": {plugins.VARIABLE: names}}} if names else {}


def _knock(address: str) -> None:
    """Where nobody listens Ray would try for many minutes, with a line for every attempt."""
    from orchestrator.execution.cluster.ray_internals import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError("no cluster is running here")
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(f"{found} cannot be reached: {error.strerror or error}") from None


def _loopback_only() -> contextlib.AbstractContextManager[None]:
    """On Linux Ray takes 127.0.0.1 for the machine's address in its network, and then listens to all the world. It
    does not where it thinks that clusters of several machines are not to be had, as it does elsewhere."""
    from orchestrator.execution.cluster.ray_internals import patched, ray_constants

    return patched(ray_constants, "ENABLE_RAY_CLUSTER", False)


def _make_token() -> None:
    """Ray writes a token into the user's home on first use, for all to read: it is made here, for the user alone."""
    from orchestrator.execution.cluster.ray_internals import tokens

    logging.getLogger(tokens.__name__).setLevel(logging.ERROR)
    before = os.umask(0o077)
    try:
        tokens.enable_token_auth_by_default()
        tokens.ensure_token_if_auth_enabled()
    except OSError as error:
        raise UserError(f"Ray's token cannot be written: {error}; say where it is with RAY_AUTH_TOKEN_PATH") from None
    finally:
        os.umask(before)


def _show_token() -> None:
    """Ray guards its clusters with a token in the user's home, but shows it by itself only to the address `auto`."""
    from orchestrator.execution.cluster.ray_internals import tokens

    logging.getLogger(tokens.__name__).setLevel(logging.ERROR)
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def local_resources() -> list[dict[str, float]]:
    """What a Ray started here would have, as a list of one node."""
    from orchestrator.execution.cluster.ray_internals import detect_local_resources

    most = 0.7 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the rest Ray leaves to others
    return [detect_local_resources(LOCAL_OBJECT_STORE, int(most))]
