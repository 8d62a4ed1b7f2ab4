"""Ray Tune drives: its trials are slots, each a federation that stays and fetches pack after pack from the desk."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Tune reads these as it starts: results go to our ledger, not to its loggers, and Ctrl-C is ours to handle; and slots
# are to be placed side by side, not one after the other
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "86400")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_WARN_THRESHOLD_S", "60")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "1000")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayActorError
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.execution.cluster import head, nodes
from orchestrator.execution.cluster.metrics import Metrics
from orchestrator.execution.cluster.ray_internals import actor_of, in_processes_that_wait
from orchestrator.execution.packing import Capacity
from orchestrator.execution.scheduler import Conductor
from orchestrator.execution.sweep import Sweep
from trainables.errors import UserError
from trainables.federation.checkpoints import PackStorage
from trainables.federation.problem import Shipper
from trainables.models import kernels
from trainables.ray_actors.desk import PackDesk
from trainables.ray_actors.federation import start_in_slot
from trainables.ray_actors.slot import PackSlot, short_of_memory

LOOK_EVERY_S = 2.0
SAY_BUSY_EVERY_S = 30.0
EXCHANGE_EVERY_S = 0.02
WAIT_FOR_NODES_S = 60.0  # how long nodes may be too few for a federation before smaller ones are made
WAIT_FOR_DESK_S = 120.0
SLOT_PATIENCE_S = (
    3600.0  # a slot speaks every second, or when a round has ended: most that hangs in it, it finds itself
)
log = logging.getLogger("fedsweep")


class StartAgainError(Exception):
    """What runs cannot go on as it is: with what the cluster is now, it can."""


class NoRoomError(StartAgainError):
    """Nodes have gone, and those that are left hold no federation of this size."""


class GPUsCameError(StartAgainError):
    """GPUs have come to a run that had none, and what was in flight on CPUs has ended."""


class DeskLostError(StartAgainError):
    """The desk's process has died, and with it what slots had reported and nobody had written down."""


class NotKept:
    """Tune pickles what it is given, to restore it later. The ledger is our state: there is nothing to keep."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __deepcopy__(self, memo: Any) -> NotKept:
        return self


class Slots(NotKept, Searcher):
    """Tune's searcher, which suggests slots: as many as there is something to do for. Those that find no room yet are
    what an autoscaler sees, and what takes a node that comes."""

    def __init__(self, conductor: Conductor) -> None:
        super().__init__(metric="packs", mode="max")
        self._conductor = conductor
        self.wanted = conductor.size.federations
        self._suggested = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        conductor = self._conductor
        if conductor.over:  # before there was any, Tune would wait for one for ten minutes
            return Searcher.FINISHED
        if self._suggested >= self.wanted or not conductor.has_use_for(self._suggested + 1):
            return None
        self._suggested += 1
        return {"slot": trial_id}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A slot that ends has nothing to say: its packs were at the desk."""

    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


class Ending(NotKept, tune.Stopper):
    """Tells Tune when all slots can go, those that still wait for room among them."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._conductor.over


class Errands(NotKept, tune.Callback):
    """Between Tune's steps: goes to the desk and back, looks at the nodes, and hears which slots have died."""

    def __init__(
        self,
        conductor: Conductor,
        slots: Slots,
        desk: Any,
        ship: Callable[[str], Any],
        say: Callable[[str], None],
        elastic: bool,
        why_stop: Callable[[], str],
    ) -> None:
        self.conductor, self.slots, self.desk, self.ship = conductor, slots, desk, ship
        self.say, self.elastic, self.why_stop = say, elastic, why_stop
        self._metrics = Metrics(conductor)
        self._said_stopping = self._sent_away = False
        self._died: list[tuple[str, str]] = []
        self._heard: dict[str, float] = {}
        self._slowest = 0.0
        """The longest that a slot which is well has been silent."""
        self._went = 0.0
        self._looked = self._had_room = self._had_slots = self._had_takers = self._said = time.monotonic()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._heard[trial.trial_id] = time.monotonic()

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any) -> None:
        now = time.monotonic()
        self._slowest = max(self._slowest, now - self._heard.get(trial.trial_id, now))
        self._heard[trial.trial_id] = now

    def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._died.append((trial.trial_id, _failure(trial)))

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        now = time.monotonic()
        if not self._died and now - self._went < EXCHANGE_EVERY_S:
            return
        at_first, self._went = not self._went, now
        look = now - self._looked >= LOOK_EVERY_S
        if look:
            self._looked = now
            working = [trial for trial in trials if trial.status == "RUNNING"]
            self._look_around(now, len(working))
            self._end_what_hangs(now, working)
        if (at_first or look) and not self.conductor.stopping and (reason := self.why_stop()):
            self.conductor.stopping = True
            log.warning("%s: stopping after the packs in flight", reason)
        if self.conductor.stopping:
            self._say_stopping()
        if self.conductor.stopping or self.conductor.moving:
            self.conductor.withdrawn(self._ask(self.desk.withdraw.remote()))
        died, self._died = self._died, []
        if died:
            self._ask(self.desk.forget.remote([slot for slot, _ in died]))
        heard = self._exchange()
        for slot, failure in died:
            self.conductor.slot_failed(
                slot, _reason(failure), blameless=NODE_DIED in failure, short=short_of_memory(failure)
            )
        if died or heard:  # what that has opened is laid out at once
            self._exchange()
        if self.conductor.over and not self._sent_away:  # or Tune would wait until their patience ends
            self._sent_away = True
            self.desk.close.remote()

    def _say_stopping(self) -> None:
        """Once, and not from within a signal's handler, which may have come in the middle of another line."""
        if not self._said_stopping:
            self._said_stopping = True
            self.say("stopping after the packs in flight; Ctrl-C once more stops now")

    def _exchange(self) -> bool:
        orders = [replace(order, shipment=self.ship(order.problem)) for order in self.conductor.orders()]
        reports, _ = self._ask(self.desk.exchange.remote(orders, tuple(self.conductor.shunned)))
        self.conductor.heard(reports)
        self._metrics.update(self.conductor)
        return bool(reports)

    def _ask(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=WAIT_FOR_DESK_S)
        except (RayActorError, GetTimeoutError) as error:
            log.warning("the desk is lost; the packs in flight start again from their checkpoints")
            raise DeskLostError from error

    def _end_what_hangs(self, now: float, working: list) -> None:
        """A slot whose process is there and says nothing: its pack goes elsewhere."""
        for trial in working:
            silent = now - self._heard.get(trial.trial_id, now)
            if silent > max(SLOT_PATIENCE_S, 20 * self._slowest):
                log.warning("a slot on %s has said nothing for %.0f s and is ended", trial.node_ip, silent)
                self._heard[trial.trial_id] = now
                ray.kill(actor_of(trial))

    # ---- nodes come and go

    def _look_around(self, now: float, working: int) -> None:
        """How many slots the nodes have room for, were nobody else there, and how many of them work."""
        size = self.conductor.size
        there, gone = nodes.present_and_gone()
        lost = gone - self.conductor.gone
        if lost:
            log.info("gone, and no fault of the packs they had: node %s", ", ".join(sorted(lost)))
            self.conductor.gone |= lost
        found = size.room(there)
        if size.waits_for_gpus and not self.conductor.moving and size.on_gpus(nodes.free_resources()):
            log.info("GPUs have come: the packs in flight end here, the rest goes on there")
            self.conductor.moving = True
        if found:
            self._had_room = now
        elif now - self._had_room > WAIT_FOR_NODES_S:
            log.warning(
                "for %.0f s no node has had room for a federation; the packs in flight start again",
                now - self._had_room,
            )
            raise NoRoomError
        self.slots.wanted = max(found, 1)
        if self.elastic:  # as many again may wait for nodes that somebody might start
            self.slots.wanted = min(found + max(1, working), size.most or 2**31)
        if working >= size.federations or not self.conductor.has_use_for(working + 1):
            self._had_slots = now
        room_for = working if now - self._had_slots > WAIT_FOR_NODES_S else max(working, size.federations)
        if working and room_for != size.federations:
            log.info("%d federations work now", room_for)
            self.conductor.resize(room_for)
        if self.conductor.in_flight or not self.conductor.laid_out:
            self._had_takers = now
        elif self.conductor.shunned and now - self._had_takers > WAIT_FOR_NODES_S:
            self.conductor.pardon()
        if found and not working and now - max(self._said, self._had_slots) > SAY_BUSY_EVERY_S:
            self._say_busy(now)

    def _say_busy(self, now: float) -> None:
        if self.conductor.size.room(nodes.free_resources()) or nodes.slots_start():
            return  # federations start
        self._said = now
        self.say(f"the cluster is busy: no node has room for a federation, {nodes.holders()}; waiting")


NODE_DIED = "node has died"  # as Ray says it


def _failure(trial: Any) -> str:
    """What Tune wrote down about the last failure, whole: Ray names the cause of a death lines before the details."""
    with contextlib.suppress(OSError, TypeError):
        return Path(trial.error_file).read_text(encoding="utf-8").rpartition("Failure #")[2]
    return ""


def _reason(failure: str) -> str:
    """Its last line."""
    lines = [line.strip() for line in failure.splitlines()[1:]]  # the first has its number and the time
    said = [line for line in lines if line and not line.startswith("File ")]
    # Ray's guesses help nobody
    return said[-1].partition(" Some common causes")[0][:500] if said else "its process ended without a word"


def run(
    sweep: Sweep,
    size: Capacity,
    on_change: Callable[[Conductor], None],
    packs: PackStorage,
    scratch: Path,
    *,
    say: Callable[[str], None] = log.info,
    elastic: bool = False,
    why_stop: Callable[[], str] = str,
    start: Callable[[], Any] | None = None,
) -> Conductor:
    """Run all that is missing. Returns when the study is finished, or stopped by one Ctrl-C.

    `scratch`: a folder for what Tune writes of its own state, which nobody reads. `elastic`: nodes may come if they are
    waited for. `why_stop`: a reason to end as after one Ctrl-C, if there is one. `start`: makes a slot's federation,
    where it is not to be the real one."""
    packs.make()
    conductor = Conductor(sweep, size, on_change, packs)
    real = start is None
    if start is None:
        kernel = kernels.chosen(size.size.device)
        log.info("the kernel of the rounds: %s", kernel)
        start = functools.partial(start_in_slot, size.size, kernel, sweep.blueprint.study.name)
    problems, shipper = sweep.blueprint.problems, Shipper()
    desk = _open_desk(sweep.blueprint.study.name)
    try:
        with quiet(), _stop_on_signal(conductor), head.watched(), in_processes_that_wait():
            slot = tune.with_parameters(PackSlot, desk=desk, start=start, storage=packs)
            slots = Slots(conductor)
            errands = Errands(
                *(conductor, slots, desk, lambda key: shipper.reference(problems[key]) if real else None),
                *(say, elastic, why_stop),
            )
            _tuner(slot, size, slots, Ending(conductor), errands, scratch).fit()
    except StartAgainError:
        if not conductor.stopping:  # or else it ends here, as was asked for
            raise
    finally:
        conductor.close()
        with contextlib.suppress(Exception):  # with the head gone there is nothing to close any more
            desk.close.remote()
            ray.kill(desk)
        shutil.rmtree(scratch, ignore_errors=True)
        packs.clear(only_if_empty=not sweep.finished)
    if conductor.moving and not (conductor.stopping or sweep.finished):
        raise GPUsCameError
    if conductor.broken:
        raise UserError(f"no trial can run here: {conductor.broken}")
    return conductor


def _open_desk(study: str) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"fedsweep {study} {secrets.token_hex(3)} desk"
    return ray.remote(PackDesk).options(num_cpus=0, scheduling_strategy=here, name=name).remote()


def _tuner(slot: Any, size: Capacity, slots: Slots, ending: Ending, errands: Errands, scratch: Path) -> tune.Tuner:
    bundles: list[dict[str, float]] = [{}, *size.size.bundles]
    # "PACK" alone would tear a federation apart where a node has room for a part of it
    strategy = nodes.STRATEGY[size.placement]
    return tune.Tuner(
        tune.with_resources(slot, tune.PlacementGroupFactory(bundles, strategy=strategy)),
        tune_config=tune.TuneConfig(
            search_alg=slots,
            num_samples=-1,
            trial_name_creator=lambda trial: f"slot_{trial.trial_id}",
            trial_dirname_creator=lambda trial: f"slot_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name="slots",
            storage_path=str(scratch.absolute()),
            stop=ending,
            failure_config=tune.FailureConfig(max_failures=-1),  # when to give up the conductor says
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            callbacks=[errands],
            verbose=0,
        ),
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ray's own messages are kept off the screen: what matters of them reaches the ledger and the log."""
    logger = logging.getLogger("ray")
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        level, logger.propagate, logger.handlers = before
        logger.setLevel(level)


@contextlib.contextmanager
def _stop_on_signal(conductor: Conductor) -> Iterator[None]:
    """Ctrl-C once: finish the packs in flight. Twice, or SIGTERM: stop now. The ledger is whole either way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        if conductor.stopping or number == signal.SIGTERM:
            raise KeyboardInterrupt
        conductor.stopping = True
        log.warning("stopping after the packs in flight; once more to stop now")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
