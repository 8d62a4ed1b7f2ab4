"""Watches whether the head of the Ray cluster still answers, and whether a local Ray is alive."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import ray

from orchestrator.console import stderr
from orchestrator.execution.cluster import ray_internals

CHECK_EVERY_S = 2.0
LEAVE_WITHIN_S = 20.0  # the time that `leave` may take
RAY_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
log = logging.getLogger("fedsweep")


@contextlib.contextmanager
def watched(leave: Callable[[float], str]) -> Iterator[None]:
    """While the block runs, end this process with an error message if the head or a process of a local Ray is lost.

    Otherwise Ray would end this process a minute after the loss, from one of Ray's own threads and without a Python
    exception; until then calls of Ray, including `ray.shutdown`, may block. The process therefore ends without
    cleaning up. The ledger is intact at any time. `leave`: called before the process ends, with the seconds that the
    call may take; the message ends with what it returns."""
    address = ray.get_runtime_context().gcs_address
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(address, ended, timeout(), leave), name="head watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def timeout() -> float:
    """Seconds without an answer after which the head counts as lost; a busy head answers sooner.

    Less than Ray's own timeout, which is a minute unless an environment variable sets another. A longer one makes sense
    if the head keeps its state in Redis and may be restarted."""
    ray_timeout = float(os.environ.get(RAY_TIMEOUT) or 60)
    return max(ray_timeout - 30, ray_timeout / 2)


def _watch(address: str, ended: threading.Event, timeout_s: float, leave: Callable[[float], str]) -> None:
    last, failed = time.monotonic(), ""
    while not ended.wait(CHECK_EVERY_S):
        try:
            if died := ray_internals.dead_local_processes():
                ray_internals.kill_local_ray()
                _end(f"the Ray on this machine has lost its {', '.join(died)}", "continues", leave)
            elif ray_internals.head_answers(CHECK_EVERY_S):
                last = time.monotonic()
            elif time.monotonic() - last > timeout_s:
                lost = f"the head of the Ray cluster at {address} has not answered for {timeout_s:g} s"
                _end(lost, "continues on a new cluster", leave)
        except Exception as error:  # Ray's private functions may raise anything
            if failed != repr(error):
                failed = repr(error)
                log.warning("the check of the Ray cluster failed, and is repeated: %s", failed)


def _end(reason: str, what_continues: str, leave: Callable[[float], str]) -> None:
    try:
        parts = [reason, f"no finished trial is lost, and the same command {what_continues}", leave(LEAVE_WITHIN_S)]
        sentence = "; ".join(filter(None, parts))
        log.error(sentence)
        stderr.show_cursor()  # a live view may have hidden it
        sys.stderr.write(f"fedsweep: {sentence}.\n")
        sys.stderr.flush()
    finally:
        os._exit(2)
