"""Watches whether the head of the Ray cluster still answers, and whether a local Ray is alive."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

import ray

from orchestrator.console import stderr
from orchestrator.execution.cluster import ray_internals

CHECK_EVERY_S = 2.0
RAY_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
log = logging.getLogger("fedsweep")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While the block runs, end this process with a sentence if the head or a process of a local Ray is lost.

    Without them, Ray ends the process after a minute from one of its own threads, without a Python exception; until
    then its calls, including `ray.shutdown`, may block. The process therefore ends without cleaning up. The ledger is
    intact at any time."""
    address = ray.get_runtime_context().gcs_address
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(address, ended, timeout()), name="head watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def timeout() -> float:
    """Seconds without an answer after which the head counts as lost; a busy head answers sooner.

    It is less than Ray's own timeout, which is a minute unless the cluster sets another. A cluster does so if its head
    keeps its state in Redis and may be restarted."""
    ray_timeout = float(os.environ.get(RAY_TIMEOUT) or 60)
    return max(ray_timeout - 30, ray_timeout / 2)


def _watch(address: str, ended: threading.Event, timeout_s: float) -> None:
    last = time.monotonic()
    while not ended.wait(CHECK_EVERY_S):
        if died := ray_internals.dead_local_processes():
            ray_internals.kill_local_ray()
            _end(f"the Ray on this machine has lost its {', '.join(died)}", "continues")
        elif ray_internals.head_answers(CHECK_EVERY_S):
            last = time.monotonic()
        elif time.monotonic() - last > timeout_s:
            _end(
                f"the head of the Ray cluster at {address} has not answered for {timeout_s:g} s",
                "continues on a new cluster",
            )


def _end(reason: str, what_continues: str) -> None:
    sentence = f"{reason}; no finished trial is lost, and the same command {what_continues}"
    log.error(sentence)
    stderr.show_cursor()  # a live view may have hidden it
    sys.stderr.write(f"fedsweep: {sentence}.\n")
    sys.stderr.flush()
    os._exit(2)
