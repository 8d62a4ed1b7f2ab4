"""Faults inside Ray's worker processes, which call `install` when they start.

$FEDSWEEP_SABOTAGE lists the faults as JSON.
"""

import itertools
import json
import os
import signal
import time

ORDER = "FEDSWEEP_SABOTAGE"
NODE = "FEDSWEEP_CHAOS_NODE"
"""The name of the node that a process runs on."""


def environment(**order) -> dict[str, str]:
    """Variables that make every worker of a driver call `install`."""
    if not order:
        return {}
    job = {"runtime_env": {"worker_process_setup_hook": "saboteur.install"}}
    return {ORDER: json.dumps(order), "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}


def install() -> None:
    order = json.loads(os.environ[ORDER])
    if "checkpoint_every_s" in order:
        from trainables.federation import checkpoint_writer

        checkpoint_writer.EVERY_S, checkpoint_writer.SHARE = order["checkpoint_every_s"], 1.0
    if "patience_s" in order:
        from trainables.ray_actors import timeouts

        timeouts.FIRST_ANSWER_S = 60.0
        timeouts.LEAST_S, timeouts.SLOWEST_TIMES = order["patience_s"], 0.0
    if "poison" in order:
        poison(order["poison"], order["victim"])
    if "trace" in order:
        trace(order["trace"])
    if "trusting" in order:
        trust_all_code()
    if "broken_nodes" in order:
        break_nodes(order["broken_nodes"])
    if "storage_fails" in order:
        fail_to_save(order["storage_fails"])
    if "storage_hangs_s" in order:
        hang_while_saving(order["storage_hangs_s"])
    if "round_takes_s" in order:
        slow_down(order["round_takes_s"])
    if "memory_for" in order:
        run_out_of_memory(order["memory_for"])
    if "clock_back_s" in order:
        turn_back_the_clock(order["clock_back_s"])


def poison(key: str, victim: str) -> None:
    """This trial kills the process that runs it, or its whole node, every time."""
    from trainables.federation.client_host import ClientHost
    from trainables.federation.server import Server
    from trainables.ray_actors.slot import PackSlot

    on_host = (ClientHost, "round", lambda host, work, *_: work.lanes)
    kind, method, keys = {
        "client host": on_host,
        "node": on_host,
        "server": (Server, "progress", lambda server, *_: [trial.key for trial in server.trials]),
        "slot process": (PackSlot, "_advance", lambda slot: [trial.key for trial in slot.runner.trials]),
    }[victim]
    original = getattr(kind, method)

    def deadly(self, *arguments):
        if key in keys(self, *arguments):
            if victim == "node":
                os.kill(os.getppid(), signal.SIGKILL)  # the raylet
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    setattr(kind, method, deadly)


def trace(file: str) -> None:
    """Every round of a client host adds a line: time, process, round, and the trials."""
    from trainables.federation.client_host import ClientHost

    original = ClientHost.round

    def traced(self, work, t, *arguments):
        reply = original(self, work, t, *arguments)
        with open(file, "a") as lines:
            lines.write(f"{time.time()} {os.getpid()} {t} {' '.join(work.lanes)}\n")
        return reply

    ClientHost.round = traced


def trust_all_code() -> None:
    """No slot, server or client host compares its code with the driver's."""
    from trainables import code_identity
    from trainables.ray_actors import federation

    code_identity.check = lambda *_: None
    federation.differences = lambda *_: ""


def break_nodes(folder: str) -> None:
    """Client hosts fail on a node as long as a file with the node's name is in the folder, like with a broken disk."""
    from trainables.federation.client_host import ClientHost

    original = ClientHost.round

    def fail(self, *arguments):
        if os.path.exists(os.path.join(folder, os.environ.get(NODE, "no name"))):
            raise OSError("Input/output error")
        return original(self, *arguments)

    ClientHost.round = fail


def fail_to_save(times: int) -> None:
    """The storage refuses this many checkpoints of each process, like object storage that is overloaded."""
    from trainables.federation.checkpoints import PackStorage

    original, left = PackStorage.save, itertools.count(times, -1)

    def refuse(self, *arguments):
        if next(left) > 0:
            raise OSError("503 Slow Down")
        original(self, *arguments)

    PackStorage.save = refuse


def hang_while_saving(seconds: float) -> None:
    """Every write of a checkpoint takes this long, like on a network disk whose server does not answer."""
    from trainables.federation.checkpoints import PackStorage

    original = PackStorage.save

    def hang(self, *arguments):
        time.sleep(seconds)
        original(self, *arguments)

    PackStorage.save = hang


def slow_down(seconds: float) -> None:
    """A round of a client host takes at least this long."""
    from trainables.federation.client_host import ClientHost

    original = ClientHost.round

    def slow(self, *arguments):
        end = time.monotonic() + seconds
        reply = original(self, *arguments)
        time.sleep(max(0.0, end - time.monotonic()))
        return reply

    ClientHost.round = slow


def run_out_of_memory(lanes: int) -> None:
    """A client host runs out of memory with more than this many lanes, with torch's error."""
    import torch

    from trainables.federation.client_host import ClientHost

    original = ClientHost.round

    def hungry(self, work, *arguments):
        if len(work.lanes) > lanes:
            raise torch.OutOfMemoryError(f"{len(work.lanes)} lanes are too many")
        return original(self, work, *arguments)

    ClientHost.round = hungry


def turn_back_the_clock(seconds: float, after: int = 100) -> None:
    """The wall clock jumps back at the hundredth call, like when a machine corrects it."""
    real, asked = time.time, itertools.count()
    time.time = lambda: real() - (seconds if next(asked) >= after else 0)
