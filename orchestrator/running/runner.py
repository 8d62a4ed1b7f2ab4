"""Ray Tune drives: packs are its trials, and this searcher hands them out as the ledger says what is missing."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Tune reads these as it starts: results go to our ledger, not to its loggers, and Ctrl-C is ours to handle
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "86400")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_WARN_THRESHOLD_S", "60")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.search import Searcher

from orchestrator.results.ledger import Row
from orchestrator.running import head
from orchestrator.running.packing import Capacity, make_packs, room
from orchestrator.search.sweep import Sweep
from trainables.errors import UserError
from trainables.models import kernels
from trainables.pack import pack_group, plan_of
from trainables.pack_storage import PackStorage
from trainables.pack_trial import PackTrial
from trainables.problem import Shipper
from trainables.server import LaneResult
from trainables.spec import TrialSpec
from trainables.stopping import companies

PACK_RETRIES = 2  # how often Tune takes a failed pack up again before it is split
GIVE_UP_AFTER = 3  # single trials failed and not one pack ended: the fault is not in the trials
LOOK_EVERY_S = 2.0
WAIT_FOR_NODES_S = 60.0  # how long nodes may be too few for a federation before smaller ones are made
log = logging.getLogger("fedsweep")


class NoRoomError(Exception):
    """Nodes have gone, and those that are left hold no federation of this size."""


class Pack(list[TrialSpec]):
    """A pack on its way through Tune, which copies and prints what it is given."""

    def __deepcopy__(self, memo: Any) -> Pack:
        return self

    def __repr__(self) -> str:
        return f"pack of {len(self)}"


@dataclass
class InFlight:
    pack: Pack
    began: float = field(default_factory=time.monotonic)
    round: int = 0
    running: int = 0
    computing_s: float = 0.0


class Conductor(Searcher):
    """Tune's searcher: suggests packs, takes their results to the ledger, and isolates what keeps failing."""

    def __init__(self, sweep: Sweep, size: Capacity, on_change: Callable[[Conductor], None]) -> None:
        super().__init__(metric="round", mode="max")
        self.sweep, self.size = sweep, size
        self._looked = self._had_room = time.monotonic()
        self.in_flight: dict[str, InFlight] = {}
        self.lane_rounds = 0
        """Rounds of single trials that have been run, for the rate."""
        self.computing_s = 0.0
        """Seconds that federations have spent in rounds."""
        self.retries = 0
        self.stopping = False
        self.broken = ""
        """Why nothing can run here at all, if that is so."""
        self.unwritable: Exception | None = None
        """Why the ledger took no more, if it did not."""
        self._lone_failures = 0
        self._any_success = False
        self._ready: list[Pack] = []
        self._limits: dict[tuple[str, str, int, int], int] = {}
        """Lanes that the device has memory for, where more were tried."""
        self._queued: set[str] = set()
        self._on_change = on_change

    # ---- what Tune asks

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if self.stopping or self.sweep.finished:
            return None if self.in_flight else Searcher.FINISHED
        if len(self.in_flight) >= self.size.federations:
            return None
        if not self._ready:
            fresh = [trial for key, trial in self.sweep.waiting.items() if key not in self._queued]
            self._ready = self._packs(fresh)
            self._queued.update(trial.key for trial in fresh)
        if not self._ready:
            return None
        pack = self._ready.pop(0)
        self.in_flight[trial_id] = InFlight(pack, running=len(pack))
        log.info("pack of %d trials starts: %s at %d rounds", len(pack), pack[0].method, pack[0].rounds)
        return {"trials": pack}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        flight = self.in_flight[trial_id]
        self._went_on(flight, result)
        self._on_change(self)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if error or result is None:
            return  # `failed` hears of it with the reason
        if result.get("lanes") is None:
            if "fits" in result:
                self._note(result)
                self._shrink(trial_id, result["fits"])
            return
        flight = self.in_flight.pop(trial_id)
        self._any_success = True
        self._went_on(flight, result)
        by_key = {trial.key: trial for trial in flight.pack}
        self._record([self._row(by_key[lane["key"]], LaneResult(**lane)) for lane in result["lanes"]])
        seconds = time.monotonic() - flight.began
        log.info(
            "pack of %d trials ended after %.2f s, %.2f s of them in its rounds",
            *(len(flight.pack), seconds, flight.computing_s),
        )

    def _packs(self, trials: Iterable[TrialSpec]) -> list[Pack]:
        return [Pack(members) for members in make_packs(trials, self.size, self._limits)]

    def _shrink(self, trial_id: str, fits: int) -> None:
        """The device has no memory for so many lanes: this pack and its like are made anew, smaller."""
        pack = self.in_flight[trial_id].pack
        if len(companies(pack)) == 1:  # a trial, or trials that must stay together
            self.failed(trial_id, f"the device has no memory for {len(pack)} lanes")
            return
        del self.in_flight[trial_id]
        group = pack_group(pack[0])
        limit = self._limits[group] = max(1, min(fits, len(pack) - 1, self._limits.get(group, fits)))
        log.warning("the device has memory for %d of %d trials: smaller packs", limit, len(pack))
        cut: list[Pack] = []
        for other in (pack, *self._ready):
            cut += self._packs(other) if pack_group(other[0]) == group and len(other) > limit else [other]
        self._ready = cut

    def _went_on(self, flight: InFlight, result: dict[str, Any]) -> None:
        """A pack has come to another round, and may have got over something by itself."""
        self.lane_rounds += max(0, result["round"] - flight.round) * flight.running
        self.computing_s += max(0.0, result["computing_s"] - flight.computing_s)
        flight.round, flight.running, flight.computing_s = result["round"], result["running"], result["computing_s"]
        self._note(result)

    def _note(self, result: dict[str, Any]) -> None:
        for note in result.get("notes", ()):
            log.warning("%s", note)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its searcher to restore it later. The ledger is our state; there is nothing to keep here."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""

    # ---- nodes come and go

    def look_around(self) -> None:
        """As many packs at a time as the nodes have room for right now."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        found = room(node_resources(), self.size.size, self.size.placement)
        if found:
            self._had_room = now
        elif now - self._had_room > WAIT_FOR_NODES_S:
            log.warning(
                "for %.0f s no node has had room for a federation; the packs in flight start again",
                now - self._had_room,
            )
            raise NoRoomError
        if found and found != self.size.federations:
            log.info("there is room for %d federations now", found)
            self.size = replace(self.size, federations=found)

    # ---- what becomes of packs

    def recovered(self, trial_id: str, reason: str) -> None:
        """Tune takes a pack up again from its last checkpoint."""
        with self._writing():
            flight = self.in_flight[trial_id]
            self.sweep.ledger.add_failure([trial.key for trial in flight.pack], reason)
        self.retries += 1
        log.warning("pack of %d trials is taken up again: %s", len(flight.pack), reason)

    def failed(self, trial_id: str, reason: str) -> None:
        """A pack has failed too often: split it until the culprit stands alone, and record that one."""
        with self._writing():
            pack = self.in_flight.pop(trial_id).pack
            self.sweep.ledger.add_failure([trial.key for trial in pack], reason)
        units = companies(pack)
        if len(units) > 1:
            log.warning("pack of %d trials failed and is split: %s", len(pack), reason)
            half = len(units) // 2
            parts = (units[:half], units[half:])
            self._ready[:0] = [Pack(trial for unit in part for trial in unit) for part in parts]
            return
        log.error("trial %s failed: %s", pack[0].key, reason)
        self._lone_failures += 1
        if self._lone_failures >= GIVE_UP_AFTER and not self._any_success:
            self.broken = reason
            self.stopping = True
            return
        # an early-stopping company fails whole: in any other company its members would be other trials
        self._record([self._row(trial, LaneResult(trial.key, state="failed"), reason) for trial in pack])

    def _row(self, trial: TrialSpec, lane: LaneResult, reason: str = "") -> Row:
        problem = self.sweep.blueprint.problems[trial.problem.key]
        plan = plan_of(trial, problem.partition.sizes)
        ended = lane.state == "done"
        return Row(
            key=trial.key,
            spec=trial.model_dump_json(),
            state=lane.state,
            reason=reason,
            rounds=lane.rounds,
            accuracy=lane.metrics["accuracy"].get(trial.rounds) if ended else None,
            loss=lane.metrics["loss"].get(trial.rounds) if ended else None,
            metrics=lane.metrics,
            epsilon_claimed=trial.privacy.epsilon,
            epsilon_local=plan.bought["local"],
            epsilon_secure=plan.bought["secure-aggregation"],
            epsilon_unsampled=plan.unsampled[trial.privacy.release],
            seconds=lane.seconds,
            correct=lane.correct,
        )

    def _record(self, rows: list[Row]) -> None:
        metric = self.sweep.blueprint.study.objective
        with self._writing():
            self.sweep.ledger.add(rows)  # on the disk first, then in the plan
            self.sweep.ended({row.key: (row.state, row.score(metric), row.loss) for row in rows})
        self._on_change(self)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Tune takes an exception of its searcher for a failure of the pack: a full disk must not become one."""
        if self.unwritable is not None:
            raise self.unwritable
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self.unwritable = error
            raise


class _Events(tune.Callback):
    """Tells the conductor what Tune's searchers are not told: why a pack failed, and that time goes on."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        self.conductor.look_around()

    def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.conductor.recovered(trial.trial_id, _reason(trial))

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.conductor.failed(trial.trial_id, _reason(trial))


def _reason(trial: Any) -> str:
    """The last line of what Tune wrote down about the failure."""
    with contextlib.suppress(OSError, TypeError):
        lines = [line.strip() for line in Path(trial.error_file).read_text(encoding="utf-8").splitlines()]
        said = [line for line in lines if line and not line.startswith(("File ", "Failure #"))]
        if said:
            return said[-1].partition(" Some common causes")[0][:500]  # Ray's guesses help nobody
    return "its process ended without a word"


def run(sweep: Sweep, size: Capacity, on_change: Callable[[Conductor], None], packs: PackStorage) -> Conductor:
    """Run all that is missing. Returns when the study is finished, or stopped by one Ctrl-C."""
    conductor = Conductor(sweep, size, on_change)
    if sweep.finished:
        return conductor
    kernel = kernels.chosen(size.size.device)
    log.info("the kernel of the rounds: %s", kernel)
    shipper = Shipper()
    shipments = {key: shipper.ship(problem) for key, problem in sweep.blueprint.problems.items()}
    bundles: list[dict[str, float]] = [{}, *([size.size.host_bundle] * size.size.hosts)]
    # "PACK" alone would tear a federation apart where a node has room for a part of it
    strategy = {"spread": "SPREAD", "pack": "STRICT_PACK"}[size.placement]
    trainable = tune.with_resources(
        tune.with_parameters(PackTrial, shipments=shipments, size=size.size, storage=packs, kernel=kernel),
        tune.PlacementGroupFactory(bundles, strategy=strategy),
    )
    packs.clear()
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=conductor,
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=lambda trial: f"pack_{trial.trial_id}",
            trial_dirname_creator=lambda trial: f"pack_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name="packs",
            storage_path=packs.path,
            storage_filesystem=packs.filesystem and PyFileSystem(FSSpecHandler(packs.filesystem)),
            failure_config=tune.FailureConfig(max_failures=PACK_RETRIES),
            # none at the end: a pack that has ended is in the ledger
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1, checkpoint_at_end=False),
            callbacks=[_Events(conductor)],
            verbose=0,
        ),
    )
    try:
        with quiet(), _stop_on_signal(conductor), head.watched():
            tuner.fit()
    except tune.TuneError:  # which carries only the words of what it was
        if conductor.unwritable is not None:
            raise conductor.unwritable from None
        raise
    finally:
        packs.clear()
    if conductor.broken:
        raise UserError(f"no trial can run here: {conductor.broken}")
    return conductor


def node_resources() -> list[dict[str, float]]:
    """The resources of every node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


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
