"""Packs that wait for a slot: in which order they run, and how they are split so that all slots end together."""

from __future__ import annotations

import bisect
import heapq
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.execution.packing import Capacity, make_packs, split, work
from trainables.federation.pack import PackGroup, pack_group
from trainables.federation.trial_spec import TrialSpec
from trainables.models.lanes import SHAPES
from trainables.models.network_settings import is_network

NO_ROUND_YET_S = 30.0  # a pack without a computed round counts as hung this long after twice its expected time
RECENT_PACKS = 7  # the number of packs that the pace is measured over
WORTH_SPLITTING_S = 1.0  # a shorter pack is not split for an idle slot
WELL_BALANCED = 1.1  # packs are split no further if slots end within this many times the shortest possible time


@dataclass
class Pack:
    trials: list[TrialSpec]
    work: float
    """Estimated cost; see `packing.work`."""
    resume_from: str = ""
    """The checkpoint to resume from."""
    continues_at: int = 0
    """The round from which the pack continues shorter runs of its trials; 0 if it starts at round 0."""
    failed_on: list[str] = field(default_factory=list)
    """The node of every failed attempt."""
    too_large_on: list[str] = field(default_factory=list)
    """The node of every attempt that ran out of memory although no other pack ran there; for packs of one trial."""
    crowded_on: list[str] = field(default_factory=list)
    """The same, where other packs ran."""
    origin: int = 0
    """Number of the first attempt at this pack, or at the pack it is a part of, so that the failures of all parts
    count as one."""

    nodes: set[str] = field(default_factory=set)
    """All nodes of the federations that have run it, in any attempt."""
    code: str = ""
    """Digest of the code that runs the pack."""
    lost_with_nodes: int = 0
    """Times in a row that its node died, without a newer checkpoint in between."""

    is_copied: bool = False
    """Another attempt at the same trials runs or is offered: the first answer wins."""

    not_on: set[str] = field(default_factory=set)
    """Nodes to which it is not offered."""
    offered: float = 0.0
    """The time of its last offer."""

    # the last attempt, if there was one
    slot: str = ""
    node: str = ""
    began: float = 0.0
    progressed: float = 0.0
    """The time of its last report."""
    first_round: int = 0
    """The round that this attempt started from."""
    reached_round: int = 0
    """The round that this attempt has reached."""
    round: int = 0
    """The last round that any attempt has reached."""
    running: int = 0
    """Lanes that have not ended."""
    computing_s: float = 0.0
    """Seconds spent in rounds, according to its last report."""
    checkpoint: str = ""
    checkpoint_round: int = 0

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def keys(self) -> list[str]:
        return [trial.key for trial in self.trials]

    @property
    def is_new(self) -> bool:
        """Whether the pack has never started, so that its trials can be packed differently."""
        return not (self.origin or self.resume_from)

    @property
    def is_last_stage(self) -> bool:
        """Whether no stage waits for this pack: results on test rows decide nothing."""
        return self.trials[0].problem.evaluate_on == "test"


def _order(pack: Pack) -> tuple[bool, bool, str, float]:
    """Networks come first, because their packs are long, and those of the same problem follow one another: a host
    computes the rows at the cut again, which takes seconds, when the problem changes."""
    problem = pack.trials[0].problem
    network = is_network(problem.model)
    return pack.is_last_stage, not network, problem.key if network else "", -pack.work


class PackQueue:
    """`rows_of`: the number of train rows, by `ProblemSpec.key`."""

    def __init__(self, capacity: Capacity, rows_of: Callable[[str], int]) -> None:
        self.capacity = capacity
        self.packs: list[Pack] = []
        self.pace: float | None = None
        """Seconds that a slot takes for a unit of work: the median of the last packs that ended."""
        self._paces: deque[float] = deque(maxlen=RECENT_PACKS)
        self._rows_of = rows_of
        self.memory_limits: dict[PackGroup, int] = {}
        """Lanes that fit into memory, for pack groups in which larger packs did not."""
        self.continues_at: Callable[[TrialSpec], int] = lambda trial: 0
        """The round from which a trial can continue a shorter one. A pack starts all its lanes at the same round."""

    @property
    def _block(self) -> int:
        """Number of lanes in a block. Lanes are computed in whole blocks."""
        return SHAPES[self.capacity.size.device].lanes

    def pack(self, trials: list[TrialSpec], resume_from: str = "") -> Pack:
        rows = self._rows_of(trials[0].problem.key)
        return Pack(trials, work(trials, rows, self.capacity.size.device), resume_from)

    def add(self, trials: Iterable[TrialSpec]) -> None:
        """Pack these trials and queue the packs, behind packs that have run before. Packs that a later stage waits for
        come before packs of the last stage, so that the later stages start early. Within each of these two kinds,
        networks come first, grouped by problem; within a problem, and among other models, long packs come first, so
        that no slot starts a long pack when the other slots end. The number of packs is chosen for the slots that have
        no pack in the queue: small packs cost more per trial, and `balance` splits the last packs."""
        idle = replace(self.capacity, federations=max(1, self.capacity.federations - len(self.packs)))
        by_start: dict[int, list[TrialSpec]] = {}
        for trial in trials:
            by_start.setdefault(self.continues_at(trial), []).append(trial)
        first_new = sum(1 for _ in itertools.takewhile(lambda pack: not pack.is_new, self.packs))
        for alike in by_start.values():
            for members in make_packs(alike, idle, self.memory_limits):
                bisect.insort(self.packs, self.pack(members), lo=first_new, key=_order)

    def resize(self, federations: int) -> None:
        """Change the number of federations. Pack groups that have too few full packs for all federations are packed
        again. In larger groups the number of federations makes no difference."""
        most = max(federations, self.capacity.federations)
        self.capacity = replace(self.capacity, federations=federations)
        groups: dict[tuple[PackGroup, int], list[Pack]] = {}
        for pack in self.packs:
            if pack.is_new:
                first = pack.trials[0]
                groups.setdefault((pack_group(first), self.continues_at(first)), []).append(pack)
        filled = {id(packs) for (group, _), packs in groups.items() if self._fills(group, packs, most)}
        few = {id(pack) for packs in groups.values() if id(packs) not in filled for pack in packs}
        trials = [trial for pack in self.packs if id(pack) in few for trial in pack.trials]
        self.packs = [pack for pack in self.packs if id(pack) not in few]
        self.add(trials)

    def _fills(self, group: PackGroup, packs: Sequence[Pack], federations: int) -> bool:
        """Whether the trials of these packs would keep this many federations busy in packs of full size."""
        lanes = min(self.capacity.lanes_per_pack, self.memory_limits.get(group, self.capacity.lanes_per_pack))
        return sum(map(len, packs)) > lanes * (federations - 1)

    def measure(self, pack: Pack, seconds: float) -> None:
        """Update the pace after a pack that took this long."""
        self._paces.append(seconds / pack.work)
        self.pace = statistics.median(self._paces)

    def seconds(self, pack: Pack) -> float:
        """Estimated duration of a pack, from the last packs that ended; infinite before the first has ended."""
        return pack.work * self.pace if self.pace is not None else float("inf")

    def seconds_left(self, pack: Pack) -> float:
        """Time left of a pack in flight, estimated from its own progress. Before its first round, this is its whole
        estimated duration (`seconds`), or infinite if the pack should have ended long ago."""
        elapsed, done = time.monotonic() - pack.began, pack.reached_round - pack.first_round
        if done > 0:
            return elapsed / done * (pack.trials[0].last_round - pack.reached_round)
        return float("inf") if elapsed > 2 * self.seconds(pack) + NO_ROUND_YET_S else self.seconds(pack)

    # ---- splitting

    def most_parts(self, pack: Pack) -> int:
        """The largest number of parts that a pack is worth splitting into, each at least one block of lanes."""
        return int(max(1, min(len(pack) // self._block, self.seconds(pack) / WORTH_SPLITTING_S)))

    def balance(self, in_flight: Iterable[Pack], offered: Collection[Pack]) -> None:
        """Split the last packs so that all slots end at about the same time."""
        if not self.packs or len(self.packs) + len(offered) >= self.capacity.federations:
            return
        in_flight = list(in_flight)

        def end(packs: Sequence[Pack], *, divisible: bool = False) -> float:
            return self._end([*packs, *offered], in_flight, divisible)

        lower_bound, best, best_packs = end(self.packs, divisible=True), end(self.packs), self.packs
        for parts in range(2, max(map(self.most_parts, self.packs)) + 1):
            if best <= WELL_BALANCED * lower_bound:
                break
            packs = [part for pack in self.packs for part in self._split(pack, min(parts, self.most_parts(pack)))]
            if (ends := end(packs)) < best:
                best, best_packs = ends, packs
        self.packs = best_packs

    def _end(self, packs: Sequence[Pack], in_flight: Sequence[Pack], divisible: bool) -> float:
        """When the last slot ends if the longest packs start first: in seconds from now, or in units of work while the
        pace is unknown. `divisible`: return a lower bound, as if packs could be divided in any way."""
        pace, now = self.pace or 1.0, time.monotonic()
        elapsed_weight = 0.0 if self.pace is None else 1.0  # seconds cannot be subtracted from units of work
        busy = [max(0.0, pack.work * pace - elapsed_weight * (now - pack.began)) for pack in in_flight]
        slots = sorted([*busy, *(0.0 for _ in range(self.capacity.federations - len(busy)))])
        durations = sorted((pack.work * pace for pack in packs), reverse=True)
        if divisible:
            return max(slots[-1], (sum(slots) + sum(durations)) / len(slots))
        for seconds in durations:
            heapq.heapreplace(slots, slots[0] + seconds)
        return max(slots)

    def _split(self, pack: Pack, parts: int) -> list[Pack]:
        return [pack] if parts == 1 else self._parts(pack, split(pack.trials, parts, self._block))

    def _parts(self, pack: Pack, trials: Iterable[list[TrialSpec]]) -> list[Pack]:
        """Make packs of these trials, with the checkpoint, failures, origin and nodes of the pack they come from."""
        parts = [self.pack(members, pack.resume_from) for members in trials]
        return [
            replace(part, failed_on=list(pack.failed_on), origin=pack.origin, nodes=set(pack.nodes)) for part in parts
        ]

    def halve(self, pack: Pack) -> None:
        """Queue the halves of a failed pack. Their count of failures starts at 0, because only one half may be at
        fault."""
        half = len(pack) // 2
        if half >= self._block:
            half = half // self._block * self._block
        halves = self._parts(pack, [pack.trials[:half], pack.trials[half:]])
        self.packs[:0] = [replace(part, failed_on=[]) for part in halves]

    def shrink(self, pack: Pack, fits: int) -> int:
        """Split a pack that did not fit into memory, and all waiting packs of its group that are too large. `fits`: the
        number of lanes that would have fit. Returns the new limit on the lanes of a pack."""
        group = pack_group(pack.trials[0])
        limit = max(1, min(fits, len(pack) - 1, self.memory_limits.get(group, fits)))
        self.memory_limits[group] = limit
        packs: list[Pack] = []
        for other in (pack, *self.packs):
            too_large = pack_group(other.trials[0]) == group and len(other) > limit
            smaller = make_packs(other.trials, self.capacity, self.memory_limits) if too_large else []
            packs += self._parts(other, smaller) if too_large else [other]
        self.packs = packs
        return limit
