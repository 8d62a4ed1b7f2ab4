"""Which pack is next, and what becomes of packs: results go to the ledger, what fails is tried again, then isolated.

Knows nothing of Ray. The runner asks for packs to lay out, and passes on what slots report and which of them died.
"""

from __future__ import annotations

import heapq
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from orchestrator.execution.packing import Capacity, make_packs, shares, work
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Row
from trainables.federation.checkpoints import PackStorage
from trainables.federation.lane_result import LaneResult
from trainables.federation.pack import PackGroup, pack_group, plan_of
from trainables.federation.trial_spec import TrialSpec
from trainables.models.lanes import SHAPES
from trainables.ray_actors.desk import Order, Report

PACK_RETRIES = 2  # how often a pack that failed is taken up again before it is split
GIVE_UP_AFTER = 3  # single trials failed, or slots that did not start, and not one pack ended: the fault is not theirs
NODE_FAILURES = 3  # packs failed on a node, one after the other, while others have ended some: it gets no more
WORTH_CUTTING_S = 1.0  # what takes less is not cut for the sake of an idle slot
SHORT_S = 5.0  # packs that take less lie ready before a slot is free; longer ones can still be cut until then
WELL_BALANCED = 1.1  # of the least time in which all slots could end together
log = logging.getLogger("fedsweep")


@dataclass
class Pack:
    trials: list[TrialSpec]
    work: float
    resume_from: str = ""
    """The checkpoint to go on from."""
    failed_on: list[str] = field(default_factory=list)
    """The nodes on which it has failed."""
    cut_from: int = 0
    """The number of the first attempt at it, or at the pack that it is a part of: parts that fail are one failure."""

    # while a slot has it
    slot: str = ""
    node: str = ""
    began: float = 0.0
    round: int = 0
    running: int = 0
    computing_s: float = 0.0
    saved: str = ""

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def fresh(self) -> bool:
        """Nothing has happened to it yet, so it can be put together otherwise."""
        return not (self.cut_from or self.resume_from)

    @property
    def last(self) -> bool:
        """No stage waits for it: test rows decide nothing."""
        return self.trials[0].problem.evaluate_on == "test"


@dataclass
class Conductor:
    sweep: Sweep
    size: Capacity
    on_change: Callable[[Conductor], None]
    storage: PackStorage | None = None
    in_flight: dict[int, Pack] = field(default_factory=dict)
    """Packs that slots work on, by the number of the attempt."""
    laid_out: dict[int, Pack] = field(default_factory=dict)
    """Packs that any slot may take."""
    lane_rounds: int = 0
    """Rounds of single trials that have been run, for the rate."""
    computing_s: float = 0.0
    """Seconds that federations have spent in rounds."""
    retries: int = 0
    stopping: bool = False
    moving: bool = False
    """The packs in flight are ended, and the rest goes on elsewhere: on devices that have come."""
    broken: str = ""
    """Why nothing can run here at all, if that is so."""
    shunned: set[str] = field(default_factory=set)
    """Nodes that fail pack after pack."""
    gone: set[str] = field(default_factory=set)
    """Nodes that have left the cluster."""

    def __post_init__(self) -> None:
        self._ready: list[Pack] = []
        self._taken_up: set[str] = set()
        """Trials of packs that a driver which was killed had begun."""
        self._limits: dict[PackGroup, int] = {}
        """Lanes that there is memory for, where more were tried."""
        self._number = 0
        self._lone_failures = self._stillborn = 0
        self._any_success = False
        self._failed_on: dict[str, set[int]] = {}
        """Which packs have failed on a node since one has ended there."""
        self._rows: dict[str, int] = {}
        self._pace: float | None = None
        """Seconds that a slot takes for a unit of work."""
        self._held: dict[str, set[str]] = {}
        """Checkpoints, and the trials for which they are kept."""
        self._tidier = ThreadPoolExecutor(1, thread_name_prefix="fedsweep-tidier")
        self.sweep.requeue_waiting()
        if self.storage is not None:
            self._take_up()

    # ---- packs to lay out

    @property
    def over(self) -> bool:
        """Nothing runs, and nothing is to be run any more."""
        return (self.stopping or self.moving or self.sweep.finished) and not self.in_flight

    def has_use_for(self, slots: int) -> bool:
        """Whether so many would have something to do, were what waits cut for them."""
        if self.stopping or self.moving:
            return False
        found = len(self.in_flight) + len(self.laid_out)
        for pack in self._ready:
            if found >= slots:
                break
            found += self._most_parts(pack)
        return found >= slots

    def orders(self) -> list[Order]:
        """Packs to lay out now: for every idle slot, and short ones for those that soon will be."""
        if self.stopping or self.moving:
            return []
        self._gather()
        slots = self.size.federations
        idle = slots - len(self.in_flight)
        if len(self.laid_out) < idle:
            self._balance()
        found = []
        while self._ready and len(self.laid_out) < (slots if self._seconds(self._ready[0]) < SHORT_S else idle):
            pack = self._ready.pop(0)
            self._number += 1
            self.laid_out[self._number] = pack
            found.append(Order(self._number, pickle.dumps(pack.trials), pack.trials[0].problem.key, pack.resume_from))
        return found

    def withdrawn(self, numbers: Iterable[int]) -> None:
        """These were taken back before anybody began them."""
        self._ready[:0] = [self.laid_out.pop(number) for number in numbers]

    def resize(self, federations: int) -> None:
        """Nodes have come or gone: what waits is put together anew."""
        self.size = replace(self.size, federations=federations)
        fresh = [trial for pack in self._ready if pack.fresh for trial in pack.trials]
        self._ready = [pack for pack in self._ready if not pack.fresh]
        self._add(self._packs(fresh))

    def _gather(self) -> None:
        """What the sweep has opened since."""
        self._add(self._packs(trial for trial in self.sweep.newly_waiting() if trial.key not in self._taken_up))

    def _add(self, packs: list[Pack]) -> None:
        """What a further stage waits for goes first, or the last stages would have the cluster to themselves; then the
        longest: so no slot begins with a long one when the others end."""
        if packs:
            again = [pack for pack in self._ready if not pack.fresh]
            fresh = [pack for pack in self._ready if pack.fresh]
            self._ready = again + sorted(fresh + packs, key=lambda pack: (pack.last, -pack.work))

    def _packs(self, trials: Iterable[TrialSpec]) -> list[Pack]:
        return [self._pack(members) for members in make_packs(trials, self.size, self._limits)]

    def _pack(self, members: list[TrialSpec], resume_from: str = "") -> Pack:
        key = members[0].problem.key
        if key not in self._rows:
            self._rows[key] = sum(self.sweep.blueprint.problems[key].partition.sizes)
        return Pack(members, work(members, self._rows[key], self.size.size.device), resume_from)

    def _seconds(self, pack: Pack) -> float:
        """That a slot will take for it, as far as the last ones tell."""
        return pack.work * self._pace if self._pace is not None else float("inf")

    def _most_parts(self, pack: Pack) -> int:
        """Into how many it can be cut where that pays: not below a block of lanes, which is computed whole anyway."""
        lasting = self._seconds(pack) / WORTH_CUTTING_S
        whole = len(pack) // SHAPES[self.size.size.device].lanes
        return int(max(1, min(whole, lasting)))

    def _balance(self) -> None:
        """The last packs before slots run out of them are cut, so that all slots end at about the same time."""
        slots = self.size.federations
        if not self._ready or len(self._ready) + len(self.laid_out) >= slots:
            return
        least = self._ends(self._ready, level=True)
        best, found = self._ends(self._ready), self._ready
        for parts in range(2, max(map(self._most_parts, self._ready)) + 1):
            if best <= WELL_BALANCED * least:
                break
            cut = [part for pack in self._ready for part in self._cut(pack, min(parts, self._most_parts(pack)))]
            if (end := self._ends(cut)) < best:
                best, found = end, cut
        self._ready = found

    def _ends(self, packs: Sequence[Pack], *, level: bool = False) -> float:
        """When the last slot ends, the longest packs begun first, in seconds from now or in units of work; `level`:
        could work be poured."""
        pace, now = self._pace or 1.0, time.monotonic()
        gone = 0.0 if self._pace is None else 1.0
        taken = [max(0.0, pack.work * pace - gone * (now - pack.began)) for pack in self.in_flight.values()]
        free = sorted([*taken, *(0.0 for _ in range(self.size.federations - len(taken)))])
        todo = sorted((pack.work * pace for pack in (*packs, *self.laid_out.values())), reverse=True)
        if level:
            return max(free[-1], (sum(free) + sum(todo)) / len(free))
        for seconds in todo:
            heapq.heapreplace(free, free[0] + seconds)
        return max(free)

    def _cut(self, pack: Pack, parts: int) -> list[Pack]:
        if parts == 1:
            return [pack]
        block = SHAPES[self.size.size.device].lanes
        return self._parts(pack, shares(pack.trials, parts, block))

    def _parts(self, pack: Pack, cut: Iterable[list[TrialSpec]]) -> list[Pack]:
        """Of a pack: with its checkpoint and what it has been through."""
        parts = [self._pack(members, pack.resume_from) for members in cut]
        return [replace(part, failed_on=list(pack.failed_on), cut_from=pack.cut_from) for part in parts]

    def _halves(self, pack: Pack) -> list[Pack]:
        half, block = len(pack) // 2, SHAPES[self.size.size.device].lanes
        if half >= block:
            half = half // block * block  # in whole blocks: a block is computed whole anyway
        parts = [pack.trials[:half], pack.trials[half:]]
        return [replace(part, failed_on=[]) for part in self._parts(pack, parts)]  # one of them may be sound

    # ---- what slots report

    def heard(self, reports: Sequence[Report]) -> None:
        """What was said since, in its order; all that has ended goes into the ledger at once."""
        rows: list[Row] = []
        for report in reports:
            if report.kind == "ended" and (pack := self._of(report)) is not None:
                by_key = {trial.key: trial for trial in pack.trials}
                rows += [self._row(by_key[lane.key], lane) for lane in pickle.loads(report.lanes)]
        if rows:
            self._record(rows)
        for report in reports:
            self._hear(report)
        if any(report.kind != "began" for report in reports):
            self.on_change(self)

    def _of(self, report: Report) -> Pack | None:
        """None: of an attempt that was given up, because its slot was thought dead."""
        return self.in_flight.get(report.number) or self.laid_out.get(report.number)

    def _hear(self, report: Report) -> None:
        pack = self._of(report)
        if pack is None:
            return
        if report.kind == "began":
            self._begin(report, pack)
            return
        if report.kind == "lost":
            log.warning("pack of %d trials was handed to a process that had died, and is laid out again", len(pack))
            self._ready.insert(0, self.in_flight.pop(report.number))
            return
        for note in report.notes:
            log.warning("%s", note)
        if report.saved and report.saved != pack.saved:
            pack.saved = report.saved
            self._held.setdefault(report.saved, {trial.key for trial in pack.trials})
        if report.kind == "too large":
            del self.in_flight[report.number]
            pack.resume_from = pack.saved or pack.resume_from
            self._shrink(pack, report.fits)
            return
        if pack.round or not pack.resume_from:  # else it has just begun at its checkpoint's round
            self.lane_rounds += max(0, report.round - pack.round) * pack.running
        self.computing_s += max(0.0, report.computing_s - pack.computing_s)
        pack.round, pack.running, pack.computing_s = report.round, report.running, report.computing_s
        if report.kind == "ended":
            del self.in_flight[report.number]
            self._end(pack)

    def _begin(self, report: Report, pack: Pack) -> None:
        self.in_flight[report.number] = self.laid_out.pop(report.number)
        again, pack.began = bool(pack.began), time.monotonic()
        pack.cut_from = pack.cut_from or report.number
        pack.slot, pack.node = report.slot, report.node
        pack.running = len(pack)
        self._stillborn = 0
        if not again:
            first = pack.trials[0]
            log.info("pack of %d trials starts: %s at %d rounds", len(pack), first.method, first.last_round)

    def _end(self, pack: Pack) -> None:
        self._any_success = True
        self._failed_on.pop(pack.node, None)
        self._tidy(pack)
        seconds = time.monotonic() - pack.began
        if not pack.failed_on and not pack.resume_from:
            self._pace = seconds / pack.work
        log.info(
            "pack of %d trials ended after %.2f s, %.2f s of them in its rounds",
            *(len(pack), seconds, pack.computing_s),
        )

    def _shrink(self, pack: Pack, fits: int) -> None:
        """There is no memory for so many lanes: this pack and its like are made anew, smaller."""
        if len(pack) == 1:
            self._give_up(pack, f"the device has no memory for {len(pack)} lanes")
            return
        group = pack_group(pack.trials[0])
        limit = self._limits[group] = max(1, min(fits, len(pack) - 1, self._limits.get(group, fits)))
        log.warning("the device has memory for %d of %d trials: smaller packs", limit, len(pack))
        cut: list[Pack] = []
        for other in (pack, *self._ready):
            too_large = pack_group(other.trials[0]) == group and len(other) > limit
            cut += self._parts(other, make_packs(other.trials, self.size, self._limits)) if too_large else [other]
        self._ready = cut

    # ---- what dies

    def slot_failed(self, slot: str, reason: str, blameless: bool = False, short: bool = False) -> None:
        """A slot has died, and what it had is begun again elsewhere. `blameless`: its node has gone, so this was not
        the pack's own doing. `short`: of memory."""
        number = next((number for number, pack in self.in_flight.items() if pack.slot == slot), None)
        if number is None:
            self._stillborn += 1
            log.warning("a federation did not start, or died without a pack: %s", reason)
            if self._stillborn >= GIVE_UP_AFTER * self.size.federations and not blameless and not self.in_flight:
                self._stop_as_broken(reason)
            return
        pack = self.in_flight.pop(number)
        self.sweep.ledger.add_failure([trial.key for trial in pack.trials], reason)
        pack.resume_from = pack.saved or pack.resume_from
        if blameless:
            self.retries += 1
            log.warning("pack of %d trials is taken up again: its node has gone", len(pack))
            self._ready.insert(0, pack)
            return
        if short and len(pack) > 1:  # what cannot be cut is tried again: others may have had it
            self._shrink(pack, len(pack) // 2)
            return
        self._blame(pack)
        pack.failed_on.append(pack.node)
        if self._tries(pack) <= PACK_RETRIES:
            self.retries += 1
            log.warning("pack of %d trials is taken up again: %s", len(pack), reason)
            self._ready.insert(0, pack)
            return
        self._give_up(pack, reason)

    def _tries(self, pack: Pack) -> int:
        """How often it has failed where a node was not at fault. That a node has gone is known some time after its
        processes have fallen silent, and before its packs have failed elsewhere."""
        return sum(node not in self.gone for node in pack.failed_on)

    def _blame(self, pack: Pack) -> None:
        """Where others can work, a node that only fails is left alone: not one where a single pack has failed again and
        again, in whatever parts, nor for a pack that has failed elsewhere, too."""
        node = pack.node
        if set(pack.failed_on) - {node, *self.gone}:
            return
        failed = self._failed_on.setdefault(node, set())
        failed.add(pack.cut_from)
        if len(failed) >= NODE_FAILURES and self._any_success and node not in self.shunned:
            others = {pack.node for pack in self.in_flight.values()} - {node, *self.shunned}
            if others:
                self.shunned.add(node)
                log.warning("node %s has failed %d packs in a row and gets no more", node, len(failed))

    def pardon(self) -> None:
        """Nobody else is there to work: nodes that failed get another chance."""
        log.warning("no other node is left: those that failed get packs again")
        self.shunned.clear()
        self._failed_on.clear()

    def _give_up(self, pack: Pack, reason: str) -> None:
        """A pack has failed too often: split it until the culprit stands alone, and record that one."""
        if len(pack) > 1:
            log.warning("pack of %d trials failed and is split: %s", len(pack), reason)
            self._ready[:0] = self._halves(pack)
            return
        log.error("trial %s failed: %s", pack.trials[0].key, reason)
        self._lone_failures += 1
        if self._lone_failures >= GIVE_UP_AFTER and not self._any_success:
            self._stop_as_broken(reason)
            return
        self._record([self._row(trial, LaneResult(trial.key, state="failed"), reason) for trial in pack.trials])
        self._tidy(pack)
        self.on_change(self)

    def _stop_as_broken(self, reason: str) -> None:
        self.broken = reason
        self.stopping = True

    # ---- checkpoints

    def _take_up(self) -> None:
        """What a driver that was killed has left: its packs go on from their last checkpoints. Parts of a pack that was
        cut have gone further than the whole, which is kept until all of them have ended: the smallest come first."""
        assert self.storage is not None
        for name, keys in sorted(self.storage.held().items(), key=lambda held: len(held[1])):
            left = [self.sweep.waiting[key] for key in keys if key in self.sweep.waiting and key not in self._taken_up]
            if not left:
                self.storage.remove(name)
                continue
            log.info("pack of %d trials goes on from its last checkpoint", len(left))
            self._held[name] = {trial.key for trial in left}
            self._taken_up.update(self._held[name])
            self._ready.append(self._pack(left, name))

    def _tidy(self, pack: Pack) -> None:
        """Checkpoints all of whose trials are in the ledger go, away from the driver's loop."""
        ended = {trial.key for trial in pack.trials}
        for name, keys in list(self._held.items()):
            keys -= ended
            if not keys:
                del self._held[name]
                if self.storage is not None:
                    self._tidier.submit(self.storage.remove, name)

    def close(self) -> None:
        self._tidier.shutdown(wait=True)

    # ---- the ledger

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
            accuracy=lane.metrics["accuracy"].get(trial.last_round) if ended else None,
            loss=lane.metrics["loss"].get(trial.last_round) if ended else None,
            metrics=lane.metrics,
            epsilon_claimed=trial.privacy.epsilon,
            epsilon_local=plan.actual_epsilon["local"],
            epsilon_secure=plan.actual_epsilon["secure-aggregation"],
            epsilon_unsampled=plan.unsampled[trial.privacy.release],
            seconds=lane.seconds,
            correct=lane.correct,
        )

    def _record(self, rows: list[Row]) -> None:
        metric = self.sweep.blueprint.study.objective
        self.sweep.ledger.add(rows)  # on the disk first, then in the plan
        self.sweep.ended({row.key: (row.state, row.score(metric), row.loss) for row in rows})
