"""One training run, from flags to numbers: what `fedsweep train` does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import ray

from orchestrator.cluster import connected
from trainables import methods
from trainables.data import features
from trainables.errors import UserError, in_range
from trainables.federation import Federation, FederationSize
from trainables.pack import plan_of
from trainables.privacy.plan import PrivacyPlan
from trainables.problem import Problem, Shipper
from trainables.server import LaneResult
from trainables.spec import HyperValue, ProblemSpec, TrialSpec


@dataclass(frozen=True)
class Training:
    """A run that has been checked in full and can start."""

    trial: TrialSpec
    problem: Problem
    plan: PrivacyPlan

    @classmethod
    def prepare(cls, trial: TrialSpec, data: features.FeatureSet) -> Training:
        """Everything that can be wrong is found here, before any actor starts."""
        in_range(1, 10**6, rounds=trial.rounds)
        in_range(1, 10**6, evaluate_every=trial.evaluate_every)
        in_range(0, 2**63 - 1, seed=trial.seed)
        if trial.problem.train_on == "all" and trial.problem.evaluate_on == "validation":
            raise UserError("evaluate-on = 'validation' needs train-on = 'train': those rows would be trained on")
        problem = Problem.prepare(data, trial.problem)
        return cls(trial, problem, plan_of(trial, problem.partition.sizes))


@dataclass(frozen=True)
class Trained:
    result: LaneResult
    seconds_per_round: float


def checked_trial(
    problem: ProblemSpec, method: str, hyperparameters: dict[str, HyperValue], **settings: object
) -> TrialSpec:
    """A trial with its hyperparameters checked and the defaults filled in."""
    complete = methods.get(method).check(hyperparameters)
    return TrialSpec.model_validate({"problem": problem, "method": method, "hyperparameters": complete, **settings})


def train(
    training: Training,
    *,
    address: str | None = None,
    hosts: int | None = None,
    on_round: Callable[[int, LaneResult], None] = lambda t, result: None,
) -> Trained:
    """Run it on a federation of its own, in the Ray at `address` or a local one."""
    with connected(address):
        federation = Federation(_size(training, hosts))
        try:
            federation.open([training.trial], Shipper().ship(training.problem))
            began, result = time.perf_counter(), LaneResult(training.trial.key)
            for t in range(1, training.trial.rounds + 1):
                (result,) = federation.advance(t)
                on_round(t, result)
                if result.state == "diverged":
                    break
            seconds = (time.perf_counter() - began) / max(1, result.rounds)
        finally:
            federation.close()
    return Trained(result, seconds)


def _size(training: Training, hosts: int | None) -> FederationSize:
    resources = ray.cluster_resources()
    clients = training.trial.problem.partition.clients
    if resources.get("GPU", 0) >= 1:
        return FederationSize(hosts=1, gpus_per_host=1)
    cpus = max(1, int(resources.get("CPU", 1)))
    wanted = cpus if hosts is None else hosts
    in_range(1, cpus, hosts=wanted)
    return FederationSize(hosts=min(wanted, clients))
