"""The problems and trials that are measured, and functions that time them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainables import methods
from trainables.data import features, partition
from trainables.federation.federation_size import FederationSize
from trainables.federation.lane_result import LaneResult
from trainables.federation.pack_runner import CHUNK_S, MOST_ROUNDS
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.lazy import torch
from trainables.privacy.plan import PrivacySettings
from trainables.ray_actors.federation import RayFederation
from trainables.ray_actors.object_store import ObjectStoreProblems

PAPER_SIZED = "synthetic-frozen"


class DisagreementError(RuntimeError):
    """Two ways to compute the same trial gave different results."""


@dataclass(frozen=True)
class Measurement:
    """The settings that all measurements share."""

    size: FederationSize
    quick: bool
    """Fewer repetitions and rounds; some measurements are left out."""
    log: Callable[[str], None]

    def repeated(self, times: int) -> int:
        """How often to repeat a measurement that takes `times` repetitions if not quick."""
        return 1 if self.quick else times

    @property
    def rounds(self) -> int:
        """Rounds per timed call of the federation."""
        return 3 if self.quick else 6


def problem_of(name: str, clients: int) -> Problem:
    """All train rows of a data set, split evenly among the clients, and its test rows."""
    data = features.load(name)
    spec = ProblemSpec(
        data=DataSpec(fingerprint=data.fingerprint),
        partition=partition.parse("iid", clients=clients, seed=42),
        train_on="all",
        evaluate_on="test",
    )
    return Problem.prepare(data, spec)


class Workload:
    """A problem, and trials of it."""

    def __init__(self, name: str, clients: int) -> None:
        self.problem = problem_of(name, clients)

    @cached_property
    def data(self) -> ProblemData:
        """The problem's data, in Ray's object store."""
        return ObjectStoreProblems().data(self.problem)

    def trials(
        self, count: int, rounds: int = 1000, every: int | None = None, method: str = "dp-fedsofim", **hypers: float
    ) -> list[TrialSpec]:
        """Trials that differ only in their clipping bound."""
        return [
            TrialSpec(
                problem=self.problem.spec,
                method=method,
                hyperparameters=methods.get(method).check(hypers),
                privacy=PrivacySettings(epsilon=10, clip=10 - 0.001 * index),
                rounds=rounds,
                evaluate_every=every or rounds,
            )
            for index in range(count)
        ]

    def flops(self) -> float:
        """Floating-point operations of the two matrix products of one trial-round."""
        return 4.0 * sum(self.problem.partition.sizes) * self.problem.model.dimension


class MeasuredFederation:
    """A federation of Ray actors that runs trials of one workload."""

    def __init__(self, federation: RayFederation, workload: Workload) -> None:
        self._federation, self._workload = federation, workload

    def open(self, trials: list[TrialSpec], rounds: int = 1) -> None:
        """Start a pack and run its first rounds, which are slower than the others."""
        self._federation.open(trials, self._workload.data)
        self._federation.progress(rounds)

    def results(self, trials: list[TrialSpec]) -> dict[str, LaneResult]:
        """Run a pack to its end; its results by trial key."""
        self._federation.open(trials, self._workload.data)
        return {lane.key: lane for lane in self._federation.advance(trials[0].rounds)}

    def seconds(self, until: int) -> float:
        """Time to continue the open pack up to a round."""
        start = time.perf_counter()
        self._federation.progress(until)
        return time.perf_counter() - start

    def round_seconds(self, rounds: int, first: int = 2) -> float:
        """Median seconds per round over three calls, each as long as in a sweep, but of at least `rounds` rounds."""
        t = first + rounds - 1
        in_time = int(CHUNK_S / self.seconds(t) * rounds)
        rounds = max(rounds, min(in_time, MOST_ROUNDS))
        return statistics.median(self.seconds(t + call * rounds) / rounds for call in (1, 2, 3))


@contextmanager
def federation(workload: Workload, size: FederationSize) -> Iterator[MeasuredFederation]:
    started = RayFederation(size)
    try:
        yield MeasuredFederation(started, workload)
    finally:
        started.close()


def best_seconds(work: Callable[[], Any], device: str, times: int = 1) -> float:
    """The shortest time until the device has finished, after one warm-up run."""
    seconds = []
    for _ in range(times + 1):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
