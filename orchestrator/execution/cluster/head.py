"""Whether the head of the Ray cluster still answers."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import ray

from orchestrator.console import stderr

LOOK_EVERY_S = 2.0
RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
log = logging.getLogger("fedsweep")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While the block runs, a head that is gone ends this process with a sentence.

    Without a head Ray waits for a minute and then ends the process from within its own threads, past all of Python's
    exceptions; until then its calls, `ray.shutdown` among them, may wait for ever. So there is nothing to unwind:
    the ledger is whole after every write."""
    address = ray.get_runtime_context().gcs_address
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(address, ended, patience()), name="head watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def patience() -> float:
    """Seconds without an answer after which a head is gone; one that is only busy answers sooner.

    Less than Ray's own patience, which is a minute unless the cluster was told of another, because its head keeps its
    state in a Redis and may come back."""
    rays = float(os.environ.get(RAYS_PATIENCE) or 60)
    return max(rays - 30, rays / 2)


def _watch(address: str, ended: threading.Event, patience_s: float) -> None:
    last = time.monotonic()
    while not ended.wait(LOOK_EVERY_S):
        if _answers(address):
            last = time.monotonic()
        elif time.monotonic() - last > patience_s:
            sentence = (
                f"the head of the Ray cluster at {address} has not answered for {patience_s:g} s; nothing finished "
                "is lost, and the same command goes on once there is a cluster again"
            )
            log.error(sentence)
            stderr.show_cursor()  # which a live view may have hidden
            sys.stderr.write(f"fedsweep: {sentence}.\n")
            sys.stderr.flush()
            os._exit(2)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_EVERY_S).close()
    except OSError:
        return False
    return True
