"""Decides which pack runs next and what follows from its outcome: results go to the ledger, failed packs are retried,
then split until the failing trial is isolated.

Backend-independent: a backend asks for packs to run, and passes on what slots report and which of them failed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain

from orchestrator.execution.attempts import Attempts
from orchestrator.execution.memory_waits import TRIES, MemoryWaits
from orchestrator.execution.node_health import NodeHealth
from orchestrator.execution.pack_queue import Pack, PackQueue
from orchestrator.execution.packing import Capacity
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Row, Stall
from trainables.federation.checkpoints import PackStorage
from trainables.federation.lane_result import LaneResult
from trainables.federation.messages import Failure, Order, Report
from trainables.federation.pack import plan_of
from trainables.federation.trial_spec import TrialSpec

PACK_RETRIES = 2  # of a failed pack, before it is split
GIVE_UP_AFTER = 3  # the sweep stops after this many failed trials without any success: the environment is at fault
LOST_WITH_NODES = 8  # a pack counts as failed after its node died this many times without a newer checkpoint
PREFER_OTHERS_S = 30.0  # a failed pack waits this long for a slot on another node
COMPARE_EVERY_S = 0.05  # per hundred packs in flight: least time between two balancings or two searches for slow packs
COPY_TIMES = 1.5  # a pack in flight is copied if its time left exceeds this many times a new attempt's, plus SHORT_S
STALLED_AFTER_S = 60.0  # shortest time without progress after which a pack counts as stalled
STALLED_TIMES = 5.0  # the same, in multiples of the longest pause between two reports so far; the longer time counts
PACKS_TO_CHOOSE_FROM = 4  # full packs per slot: the searches of further cells start until this many wait
SHORT_S = 5.0  # shorter packs are offered before a slot is free; longer ones are not, so that they can still be split
log = logging.getLogger("fedsweep")


class Scheduler:
    def __init__(
        self,
        sweep: Sweep,
        capacity: Capacity,
        on_change: Callable[[Scheduler], None],
        storage: PackStorage | None = None,
        health: NodeHealth | None = None,
    ) -> None:
        self.sweep, self.storage, self._on_change = sweep, storage, on_change
        self.health = health or NodeHealth()
        self.in_flight = Attempts()
        """Packs that slots run, by the number of the attempt."""
        self.offered = Attempts()
        """Packs that wait for a slot to take them."""
        self._memory = MemoryWaits()
        self._limited_offers: list[int] = []
        """Offers of copies, or to some nodes only; some may have been taken since."""
        self.lane_rounds = 0
        """Trial-rounds computed so far."""
        self.computing_s = 0.0
        """Seconds that federations have spent in rounds."""
        self.retries = 0
        self.repeated_rounds = 0
        """Rounds of packs that were computed, lost and must be computed again."""
        self.superseded: list[int] = []
        """Attempts and offers that are no longer needed; slots should drop them."""
        self.stopping = False
        self.moving_to_gpus = False
        """The packs in flight end on CPUs; the other packs will run on GPUs that have joined the cluster."""
        self.fatal_error = ""
        """Why no trial can run here; empty if trials can run."""
        problems = sweep.prepared.problems
        self.queue = PackQueue(capacity, cache(lambda key: sum(problems[key].partition.sizes)))
        self.queue.continues_at = self._continues_at
        self._number = 0
        """Number of the last attempt."""
        self._balanced = self._compared = -math.inf
        """When waiting packs were last balanced, and when packs in flight were last compared with new attempts."""
        self.announcements: list[str] = []
        """Sentences for the user that have not been shown yet."""
        self._announced: set[str] = set()
        self._failed_trials = 0
        self._blocked_for: set[int] = set()
        """Origins of the packs for which `_blocks_node` has tried to block a node."""
        self._longest_pause = 0.0
        """Longest time between two reports of a pack, in seconds."""
        self._stalled: set[int] = set()
        """Numbers of the attempts without progress."""
        self.stall_changes = 0
        """How often the list of packs without progress has changed."""
        self._any_success = False
        self._checkpoints: dict[str, set[str]] = {}
        """The trials that still need each checkpoint."""
        self._checkpoints_of: dict[str, list[str]] = {}
        """The checkpoints that each trial still needs."""
        self._paused: dict[str, tuple[str, int]] = {} if storage is None else storage.paused_lanes()
        """File and round of lanes that stopped early, by the full key of their trial."""
        self._cleaner = ThreadPoolExecutor(1, thread_name_prefix="fedsweep-cleaner")
        size = capacity.size
        self._device = f"{size.accelerator} {size.device} {size.gpus_per_host:g}"
        self.queue.memory_limits = sweep.ledger.memory_limits(self._device)
        sweep.ledger.set_stalls([])
        sweep.open_at_least(PACKS_TO_CHOOSE_FROM * capacity.federations * capacity.lanes_per_pack)
        resumed = self._resume_from_checkpoints(storage) if storage is not None else set()
        self.queue.add(trial for key, trial in sweep.waiting.items() if key not in resumed)

    # ---- packs to run

    @property
    def over(self) -> bool:
        """Nothing runs, and nothing more will be started."""
        return (self.stopping or self.moving_to_gpus or self.sweep.finished) and not self.in_flight

    def can_use(self, slots: int) -> bool:
        """Whether this many slots would have work if waiting packs were split for them."""
        if self.stopping or self.moving_to_gpus:
            return False
        packs = len(self.in_flight) + len(self.offered)
        if packs + len(self.queue.packs) >= slots:
            return True
        return packs + sum(map(self.queue.most_parts, self.queue.packs)) >= slots

    def next_orders(self) -> list[Order]:
        """Packs to offer now: one for every idle slot, and short ones in advance."""
        if self.stopping or self.moving_to_gpus:
            return []
        nothing_runs = not (self.in_flight or self.offered or self.queue.packs)
        self.queue.packs[:0] = self._memory.due(nothing_runs=nothing_runs)
        slots = self._memory.usable(self.queue.capacity.federations, self._slots_of_node)
        idle = slots - len(self.in_flight)
        in_advance = slots == self.queue.capacity.federations
        orders = self._offer_to_all()
        limited = [self.offered[number] for number in self._limited_offers]
        # offers that any slot may take
        offered = len(self.offered) - sum(pack.is_copied or bool(pack.not_on) for pack in limited)
        now, pause = time.monotonic(), len(self.in_flight) // 100 * COMPARE_EVERY_S
        packs = self.queue.packs
        if packs and offered < idle:
            if now - self._balanced >= pause:
                self._balanced = now
                self.queue.balance(self.in_flight.values(), self.offered.values())
            elif offered + len(packs) < idle:
                return orders  # waiting packs may have to be split first
        packs = self.queue.packs
        while packs and offered < (slots if in_advance and self.queue.seconds(packs[0]) < SHORT_S else idle):
            pack = packs.pop(0)
            orders.append(self._offer(pack, avoid=[*pack.failed_on, *pack.too_large_on, *pack.crowded_on[-1:]]))
            offered += not pack.not_on
        if not packs and len(self.offered) < idle and now - self._compared >= pause:
            self._compared = now
            orders += self._copies(idle - len(self.offered))
        return orders

    @property
    def _slots_of_node(self) -> int:
        """The number of slots on a node, about; the number of all slots if federations are spread."""
        nodes = 1 if self.queue.capacity.placement == "spread" else max(1, len(self.health.usable))
        return math.ceil(self.queue.capacity.federations / nodes)

    def _offer(self, pack: Pack, avoid: Iterable[str]) -> Order:
        """Offer a pack. `avoid`: nodes that must not take it; ignored if there are no others."""
        self._number += 1
        self.offered[self._number] = pack
        pack.offered, pack.not_on = time.monotonic(), set(avoid)
        if pack.not_on and not self._has_other_nodes(pack.not_on):
            pack.not_on = set()
        if pack.not_on or pack.is_copied:
            self._limited_offers.append(self._number)
        paused, not_on = self._lanes_to_continue(pack), tuple(sorted(pack.not_on))
        return Order(self._number, pack.trials, pack.resume_from, continue_from=paused, not_on=not_on)

    def _offer_to_all(self) -> list[Order]:
        """Replace offers that only some nodes may take by offers to all nodes, unless they should wait longer."""
        self._limited_offers = [number for number in self._limited_offers if number in self.offered]
        limited = [(number, self.offered[number]) for number in self._limited_offers]
        numbers = {number: None for number, pack in limited if pack.not_on and not self._waits_for_others(pack)}
        self._limited_offers = [number for number in self._limited_offers if number not in numbers]
        self.superseded += numbers
        return [self._offer(self.offered.pop(number), avoid=()) for number in numbers]

    def _waits_for_others(self, pack: Pack) -> bool:
        """Whether an offered pack should still wait for a slot on a node that is not in `not_on`."""
        if pack.is_copied or time.monotonic() - pack.offered < PREFER_OTHERS_S:
            return self._has_other_nodes(pack.not_on)
        return self._node_may_be_at_fault(pack) or self._should_run_elsewhere(pack)

    def _has_other_nodes(self, nodes: Iterable[str]) -> bool:
        """Whether nodes other than these may have slots. False if federations are spread: they may use any node."""
        if self.queue.capacity.placement == "spread":
            return False
        others = self.health.excluded.union(nodes)
        return any(node not in others for node in chain(self.in_flight.nodes, self.health.usable))

    def _has_other_sound_nodes(self, nodes: Iterable[str], failures: int) -> bool:
        """Whether nodes other than these run packs or are starting, and have not failed this many packs. False if
        federations are spread."""
        if self.queue.capacity.placement == "spread":
            return False
        others = self.health.excluded.union(nodes, self.health.suspected(failures))
        return any(node not in others for node in chain(self.in_flight.nodes, self.health.starting))

    def _lanes_to_continue(self, pack: Pack) -> tuple[str, ...]:
        """The files with the state of the pack's lanes, if shorter runs of all its trials have ended at the same round.
        A pack that continues from them has the same results as one that starts at round 0."""
        rounds = {self._continues_at(trial) for trial in pack.trials}
        pack.continues_at = rounds.pop() if len(rounds) == 1 else 0
        if not pack.continues_at:
            return ()
        return tuple(dict.fromkeys(self._paused[trial.full_key][0] for trial in pack.trials))

    def _continues_at(self, trial: TrialSpec) -> int:
        """The round that a shorter run of this trial has reached; 0 if there is none."""
        t = self._paused[trial.full_key][1] if trial.full_key in self._paused else 0
        return t if t < trial.last_round else 0

    def _copies(self, count: int) -> list[Order]:
        """Orders for idle slots: copies of packs in flight that would end much sooner elsewhere. Results are pure
        functions of the trials' keys, so it does not matter which slot answers first."""

        def gain(pack: Pack) -> float:
            return self.queue.seconds_left(pack) - COPY_TIMES * self.queue.seconds(pack) - SHORT_S

        slow = [pack for pack in self.in_flight.values() if not pack.is_copied and gain(pack) > 0]
        orders = []
        for pack in sorted(slow, key=gain, reverse=True)[:count]:
            log.info("pack of %d trials is slow on node %s: a copy is offered", len(pack), self.health.name(pack.node))
            copy = self.queue.pack(pack.trials, pack.checkpoint or pack.resume_from)
            copy.origin, copy.nodes, copy.checkpoint_round = pack.origin, set(pack.nodes), pack.checkpoint_round
            copy.is_copied = pack.is_copied = True
            orders.append(self._offer(copy, avoid=[pack.node]))
        return orders

    def _supersede(self, pack: Pack) -> None:
        """The trials of this pack have ended: no other attempt at them is needed."""
        for attempts in (self.in_flight, self.offered):
            for number in attempts.with_trials_of(pack):
                del attempts[number]
                self.superseded.append(number)

    def _drop_copy(self, pack: Pack) -> bool:
        """This attempt has failed or was given back. Returns whether another attempt at its trials
        remains, so that this one needs no retry."""
        if not pack.is_copied:
            return False
        same = (attempts[n] for attempts in (self.in_flight, self.offered) for n in attempts.with_trials_of(pack))
        twin = next((other for other in same if other is not pack), None)
        if twin is not None:
            twin.is_copied = False
        return twin is not None

    def withdraw(self, numbers: Iterable[int]) -> None:
        """These offers were taken back before a slot took them."""
        withdrawn = [self.offered.pop(number) for number in numbers if number in self.offered]
        self.queue.packs[:0] = [pack for pack in withdrawn if not self._drop_copy(pack)]

    # ---- reports

    def receive(self, reports: Sequence[Report]) -> None:
        """Handle reports in order, starts first: a short pack may start and end within one batch. All results of
        packs that ended go to the ledger in one transaction."""
        for report in reports:
            if report.kind == "started" and (pack := self.offered.get(report.number)) is not None:
                self._start(report, pack)
        rows: list[Row] = []
        places: dict[str, tuple[list[str], str]] = {}
        for report in reports:
            if report.kind == "ended" and (pack := self._pack_of(report)) is not None:
                trials = {trial.key: trial for trial in pack.trials}
                rows += [self._row(trials[lane.key], lane) for lane in report.lanes]
                if report.paused:
                    ended = [trials[lane.key] for lane in report.lanes if lane.state == "done"]
                    self._paused |= {trial.full_key: (report.paused, trial.last_round) for trial in ended}
                places |= dict.fromkeys(trials, (sorted({self.health.name(node) for node in pack.nodes}), pack.code))
        if rows:
            self._record(rows, places)
            self._announce(rows)
        for report in reports:
            if report.kind != "started" and (pack := self._pack_of(report)) is not None:
                self._handle(report, pack)
        if any(report.kind not in ("alive", "started") for report in reports):
            self._on_change(self)

    def _announce(self, rows: Iterable[Row]) -> None:
        """Tell the user once about each exception in a method or model. Another attempt would raise it again."""
        for row in rows:
            sentence = row.reason.partition("\n")[0]
            failed = row.state == "failed" and sentence
            if failed and self._announce_once(f"some trials fail, the others continue: {sentence}"):
                log.error("trial %s and others failed: %s", row.key, row.reason)

    def _announce_once(self, sentence: str) -> bool:
        """Returns whether the sentence is new."""
        if sentence in self._announced:
            return False
        self._announced.add(sentence)
        self.announcements.append(sentence)
        return True

    def _pack_of(self, report: Report) -> Pack | None:
        """The pack that a report is about. None if the attempt was given up: its slot was considered dead, or another
        attempt has ended its trials."""
        return self.in_flight.get(report.number) or self.offered.get(report.number)

    def _handle(self, report: Report, pack: Pack) -> None:
        if report.kind in ("lost", "handed back", "too large") and self._drop_copy(pack):
            del self.in_flight[report.number]
            return
        if report.kind == "lost":
            log.warning("pack of %d trials was handed to a process that had died; it is queued again", len(pack))
            self.queue.packs.insert(0, self.in_flight.pop(report.number))
            return
        for note in report.notes:
            log.warning("%s", note)
        now = time.monotonic()
        self._longest_pause = max(self._longest_pause, now - pack.progressed)
        pack.progressed = now
        if report.checkpoint:
            pack.checkpoint = report.checkpoint
            self._need_checkpoint(report.checkpoint, pack.keys)
        if report.checkpoint_round > pack.checkpoint_round:
            pack.checkpoint_round = report.checkpoint_round
            pack.lost_with_nodes = 0  # it gets further
            pack.failed_on = [node for node in pack.failed_on if node not in self.health.lost]
        if report.kind == "handed back":
            del self.in_flight[report.number]
            pack.resume_from = pack.checkpoint or pack.resume_from
            where = f"at round {report.round}: node {self.health.name(pack.node)} is about to leave"
            log.warning("pack of %d trials is handed back %s", len(pack), where)
            self.queue.packs.insert(0, pack)
            return
        if report.kind == "too large":
            del self.in_flight[report.number]
            pack.resume_from = pack.checkpoint or pack.resume_from
            self._shrink(pack, report.fits)
            return
        if pack.round or not pack.resume_from:  # a resumed pack starts at its checkpoint's round, which is unknown here
            self.lane_rounds += max(0, report.round - pack.round) * pack.running
        self.computing_s += max(0.0, report.computing_s - pack.computing_s)
        pack.reached_round = report.round
        pack.round = max(pack.round, report.round)
        pack.running, pack.computing_s = report.running, report.computing_s
        if report.kind == "ended":
            del self.in_flight[report.number]
            self._end(pack, measure=all(lane.state != "failed" for lane in report.lanes))
            if pack.is_copied:
                self._supersede(pack)

    def _start(self, report: Report, pack: Pack) -> None:
        del self.offered[report.number]
        if self.health.has_other_accelerator(report.nodes[0], report.accelerator):
            self.superseded.append(report.number)
            if not self._drop_copy(pack):
                self.queue.packs.insert(0, pack)
            return
        pack.slot, pack.node = report.slot, report.nodes[0]
        self.in_flight[report.number] = pack
        first_attempt, pack.began = not pack.began, time.monotonic()
        pack.origin = pack.origin or report.number
        pack.nodes |= set(report.nodes)
        pack.code = report.code
        if pack.continues_at and not pack.resume_from:
            pack.round = pack.checkpoint_round = pack.continues_at
        pack.first_round = pack.reached_round = pack.checkpoint_round if pack.resume_from or pack.continues_at else 0
        pack.progressed = time.monotonic()
        pack.running = len(pack)
        self.health.slot_started(pack.node)
        if first_attempt:
            first = pack.trials[0]
            log.info("pack of %d trials starts: %s at %d rounds", len(pack), first.method, first.last_round)
        else:
            log.info("pack of %d trials is started again, from round %d", len(pack), pack.checkpoint_round)

    def _end(self, pack: Pack, *, measure: bool) -> None:
        """A pack has ended. `measure`: whether its duration may be used to estimate that of other packs."""
        self._any_success = True
        self.health.pack_ended(pack.node)
        self._release_checkpoints(pack)
        seconds = max(time.monotonic() - pack.began, pack.computing_s)  # its start may have been reported late
        if measure and not pack.failed_on and not pack.resume_from and not pack.continues_at:
            self.queue.measure(pack, seconds)
        log.info("pack of %d trials ended after %.2f s, %.2f s in rounds", len(pack), seconds, pack.computing_s)

    def _shrink(self, pack: Pack, fits: int) -> None:
        if len(pack) == 1:
            reason = "one lane does not fit into the device's memory"
            self.sweep.ledger.add_failure(pack.keys, reason)
            self._does_not_fit(pack, reason)
            return
        limit = self.queue.shrink(pack, fits)
        self.sweep.ledger.set_memory_limits(self._device, self.queue.memory_limits)
        log.warning("%d of %d trials fit into the device's memory: packs are made smaller", limit, len(pack))

    def _does_not_fit(self, pack: Pack, reason: str) -> None:
        """A trial that is alone in its pack does not fit, perhaps because others use the memory at the moment."""
        spread = self.queue.capacity.placement == "spread"
        alone = not self.in_flight if spread else pack.node not in self.in_flight.nodes
        (pack.too_large_on if alone else pack.crowded_on).append(pack.node)
        if len(pack.too_large_on) >= TRIES and not self._should_run_elsewhere(pack):
            self._give_up(pack, reason)
            return
        if alone:
            self._announce_once("a trial does not fit into the device's memory; it waits and is tried again")
        else:
            self._announce_once("a trial does not fit into the device's memory next to others: fewer run at a time")
        seconds = self._memory.wait(pack, alone=alone)
        self._count_retry(pack, f"{reason}; it waits up to {seconds:.0f} s")
        self._on_change(self)

    def _should_run_elsewhere(self, pack: Pack) -> bool:
        """Whether a trial that repeatedly did not fit on one node waits for another one, which may have more memory."""
        nodes = set(pack.too_large_on)
        return len(pack.too_large_on) >= TRIES and len(nodes) == 1 and self._has_other_sound_nodes(nodes, 2)

    # ---- failures

    def slot_failed(self, slot: str, failure: Failure) -> None:
        """A slot has failed: its pack, if it had one, is retried, split or given up."""
        number = self.in_flight.of_slot(slot)
        if failure.kind == "other code":
            self.health.refuse_different_code(failure.node, failure.reason)
        if number is None:
            if failure.kind == "out of memory" and self._memory.short:
                log.warning("an idle federation failed: %s", failure.reason)
            elif failure.kind in ("error", "out of memory"):
                log.warning("a federation did not start, or failed without a pack: %s", failure.reason)
                self.health.start_failed(failure.node, slot, failure.reason)
            return
        pack = self.in_flight.pop(number)
        self.sweep.ledger.add_failure(pack.keys, failure.reason)
        if self._drop_copy(pack):
            return
        pack.resume_from = pack.checkpoint or pack.resume_from
        self.repeated_rounds += max(0, pack.reached_round - pack.checkpoint_round)
        node = failure.node or pack.node
        if failure.kind in ("other code", "left"):
            self._retry(pack, failure.reason)
        elif failure.kind == "node died":
            pack.lost_with_nodes += 1
            self._retry_unless_it_kills_nodes(pack, "its node died")
        elif failure.kind == "out of memory" and len(pack) > 1:
            self._shrink(pack, len(pack) // 2)
        elif failure.kind == "out of memory":
            self._does_not_fit(pack, failure.reason)
        else:
            self._count_node_failure(pack, node)
            pack.failed_on.append(node)
            # Ray reports that a process failed before it reports that its node died: this may be such a failure
            if not self._failed_too_often(pack) or self._node_may_be_at_fault(pack) or self._blocks_node(pack, node):
                self._retry_unless_it_kills_nodes(pack, failure.reason)
            else:
                self._give_up(pack, failure.reason)

    def _failed_on_lost(self, pack: Pack) -> int:
        """Number of failed attempts on nodes that have left the cluster since."""
        return sum(node in self.health.lost for node in pack.failed_on)

    def _failed_too_often(self, pack: Pack) -> bool:
        """Whether all retries are used up. Failures on lost nodes do not count."""
        return len(pack.failed_on) - self._failed_on_lost(pack) > PACK_RETRIES

    def _node_may_be_at_fault(self, pack: Pack) -> bool:
        """Whether a pack that failed too often should be tried on another node. This is so if it failed on one node
        only or no pack has ended anywhere, and if there is another sound node."""
        failed_on = set(pack.failed_on) - self.health.lost
        doubtful = len(failed_on) == 1 or not self._any_success
        return self._failed_too_often(pack) and doubtful and self._has_other_sound_nodes(failed_on, 2)

    def _blocks_node(self, pack: Pack, node: str) -> bool:
        """If federations are spread, block the node of a pack that failed too often there and nowhere else, because the
        pack cannot be kept off that node in another way. A pack and its parts block one node at most, because they may
        be at fault themselves. Returns whether the node was blocked."""
        elsewhere = set(pack.failed_on) - {node, *self.health.lost}
        if self.queue.capacity.placement != "spread" or elsewhere or pack.origin in self._blocked_for:
            return False
        self._blocked_for.add(pack.origin)
        return self.health.block_once(node)

    def _retry_unless_it_kills_nodes(self, pack: Pack, reason: str) -> None:
        """The loss of a node is not the pack's fault, unless it happens repeatedly and the pack gets no further."""
        if pack.lost_with_nodes + self._failed_on_lost(pack) < LOST_WITH_NODES:
            self._retry(pack, reason)
        else:
            pack.lost_with_nodes = 0
            self._give_up(pack, f"{LOST_WITH_NODES} nodes died while it ran, and it got no further")

    def _retry(self, pack: Pack, reason: str) -> None:
        self._count_retry(pack, reason)
        self.queue.packs.insert(0, pack)

    def _count_retry(self, pack: Pack, reason: str) -> None:
        self.retries += 1
        rounds = f"from round {pack.checkpoint_round} of {pack.round} computed"
        log.warning("pack of %d trials is retried %s: %s", len(pack), rounds, reason)

    def _count_node_failure(self, pack: Pack, node: str) -> None:
        """Count a failed pack against its node, unless the pack has also failed on another node. The parts of a split
        pack count once."""
        if set(pack.failed_on) - {node, *self.health.lost}:
            return
        blocked = {node, *self.health.blocked}
        others_work = any(other not in blocked for other in self.in_flight.nodes)
        self.health.pack_failed(node, pack.origin, self._any_success and others_work)

    def record_stalls(self) -> None:
        """Record the packs in flight that made no progress for much longer than any pack before, for `fedsweep
        status`."""
        patience, now = max(STALLED_AFTER_S, STALLED_TIMES * self._longest_pause), time.monotonic()
        stalled = {number: pack for number, pack in self.in_flight.items() if now - pack.progressed > patience}
        if stalled.keys() == self._stalled:
            return
        for number in stalled.keys() - self._stalled:
            pack = stalled[number]
            node = self.health.name(pack.node)
            log.warning("pack of %d trials: no progress for %.0f s on node %s", len(pack), now - pack.progressed, node)
        self._stalled = set(stalled)
        self.stall_changes += 1
        self.sweep.ledger.set_stalls(
            Stall(self.health.name(pack.node), len(pack), time.time() - (now - pack.progressed))
            for pack in stalled.values()
        )
        self._on_change(self)

    def stop_if_no_node_is_left(self) -> None:
        if not self.in_flight and not self.stopping and (reason := self.health.no_node_left):
            self._stop(reason)

    def _give_up(self, pack: Pack, reason: str) -> None:
        """Split a pack that failed too often until the failing trial is alone, and record that trial as failed. Stop
        the sweep instead if several trials have failed, no pack has ended, and no sound node is left."""
        if len(pack) > 1:
            log.warning("pack of %d trials failed and is split: %s", len(pack), reason)
            self.queue.halve(pack)
            return
        (trial,) = pack.trials
        log.error("trial %s failed: %s", trial.key, reason)
        self._failed_trials += 1
        if self._failed_trials >= GIVE_UP_AFTER and not self._any_success and not self._has_other_sound_nodes((), 1):
            self._stop(reason)
            return
        self._record([self._row(trial, LaneResult(trial.key, state="failed"), reason)], {})
        self._release_checkpoints(pack)
        self._on_change(self)

    def _stop(self, reason: str) -> None:
        self.fatal_error = reason
        self.stopping = True

    # ---- checkpoints

    def _resume_from_checkpoints(self, storage: PackStorage) -> set[str]:
        """Queue the packs that an earlier driver left unfinished. Returns the keys of their trials. A trial of a split
        pack may be in several checkpoints. The checkpoint of the smallest pack is the newest, so small packs come
        first."""
        resumed: set[str] = set()
        for name, keys in sorted(storage.trials_by_checkpoint().items(), key=lambda item: len(item[1])):
            waiting = [self.sweep.waiting[key] for key in keys if key in self.sweep.waiting]
            trials = [trial for trial in waiting if trial.key not in resumed]
            if not trials:
                storage.remove(name)
                continue
            log.info("pack of %d trials resumes from its last checkpoint", len(trials))
            keys = [trial.key for trial in trials]
            self._need_checkpoint(name, keys)
            resumed.update(keys)
            self.queue.packs.append(self.queue.pack(trials, name))
        return resumed

    def _need_checkpoint(self, name: str, keys: Sequence[str]) -> None:
        """Keep a checkpoint until these trials have ended."""
        if name not in self._checkpoints:
            self._checkpoints[name] = set(keys)
            for key in keys:
                self._checkpoints_of.setdefault(key, []).append(name)

    def _release_checkpoints(self, pack: Pack) -> None:
        """Remove the pack's checkpoints that no other trial needs. A thread removes them, because storage may be
        slow."""
        for key in pack.keys:
            for name in self._checkpoints_of.pop(key, ()):
                self._checkpoints[name].discard(key)
                if not self._checkpoints[name]:
                    del self._checkpoints[name]
                    if self.storage is not None:
                        self._cleaner.submit(self.storage.remove, name)

    def close(self) -> None:
        self._cleaner.shutdown(wait=True)

    # ---- the ledger

    def _row(self, trial: TrialSpec, lane: LaneResult, reason: str = "") -> Row:
        plan = plan_of(trial, self.sweep.prepared.problems[trial.problem.key].partition.sizes)
        done = lane.state == "done"
        return Row(
            key=trial.key,
            spec=trial.model_dump_json(),
            state=lane.state,
            reason=reason or lane.reason,
            rounds=lane.rounds,
            accuracy=lane.metrics["accuracy"].get(trial.last_round) if done else None,
            loss=lane.metrics["loss"].get(trial.last_round) if done else None,
            metrics=lane.metrics,
            epsilon_claimed=trial.privacy.epsilon,
            epsilon_local=plan.actual_epsilon["local"],
            epsilon_secure=plan.actual_epsilon["secure-aggregation"],
            epsilon_unsampled=plan.unsampled[trial.privacy.release],
            seconds=lane.seconds,
            correct=lane.correct,
        )

    def _record(self, rows: list[Row], places: Mapping[str, tuple[Sequence[str], str]]) -> None:
        """Write results, and the stages that they open, in one transaction, before any pack of these stages can run.
        `places`: for every trial, the names of its nodes and the digest of the code."""
        metric, ledger = self.sweep.prepared.study.objective, self.sweep.ledger
        with ledger.transaction():
            ledger.add(rows, places)
            new = self.sweep.ended({row.key: (row.state, row.score(metric), row.loss) for row in rows})
        self.queue.add(new)
