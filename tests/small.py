"""Small problems and trials, and how to run them: what most tests start from."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from trainables import methods
from trainables.data import features
from trainables.data import partition as partitions
from trainables.federation.problem import Problem, in_process
from trainables.federation.server import HostsHere, Server
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.models import kernels
from trainables.privacy.plan import PrivacySettings

SMALL = "synthetic-frozen:600,100,12,4"


@functools.lru_cache
def problem(
    data: str = SMALL,
    partition: str = "dirichlet:1",
    clients: int = 5,
    train_on: str = "all",
    evaluate_on: str = "test",
    model: str = "softmax",
) -> Problem:
    loaded = features.load(data)
    spec = ProblemSpec(
        data=DataSpec(fingerprint=loaded.fingerprint),
        partition=partitions.parse(partition, clients=clients, seed=42),
        train_on=train_on,
        evaluate_on=evaluate_on,
        model=model,
    )
    return Problem.prepare(loaded, spec)


def trial(
    of: Problem, method: str, hypers: dict | None = None, *, rounds: int = 12, every: int = 4, seed: int = 42, **privacy
) -> TrialSpec:
    """A trial with the method's defaults, except for what is given."""
    return TrialSpec(
        problem=of.spec,
        method=method,
        hyperparameters=methods.get(method).check(hypers or {}),
        privacy=PrivacySettings(**{"epsilon": 8.0, "clip": 5.0, **privacy}),
        rounds=rounds,
        evaluate_every=every,
        seed=seed,
    )


@dataclass(frozen=True)
class Outcome:
    """All that a trial leaves behind, to the last bit; only the time it took is left out."""

    state: str
    rounds: int
    metrics: str
    correct: bytes
    weights: bytes
    """After the round before the last: the server lets go of a lane that is done."""


def run(
    trials, of: Problem, *, hosts: int = 1, restart_at: int | None = None, device: str = "cpu"
) -> dict[str, Outcome]:
    """A pack in this process; at `restart_at` everything is thrown away and taken up again from a snapshot."""
    shipment = in_process(of)
    server = Server(HostsHere(hosts, device), device)
    server.open(trials, shipment)
    if restart_at:
        server.advance(restart_at)
        saved = server.snapshot()
        server = Server(HostsHere(hosts, device), device)
        server.open(trials, shipment, saved)
    server.advance(server.rounds - 1)
    weights = {t.key: row.cpu().numpy().tobytes() for t, row in zip(server.trials, server.theta, strict=True)}
    server.advance(server.rounds)
    return {
        key: Outcome(r.state, r.rounds, repr(r.metrics), r.correct, weights.get(key, b""))
        for key, r in server.results.items()
    }


def assert_same_bits(trials, of: Problem) -> None:
    """Together or alone, on one host or three, with a restart or without."""
    together = run(trials, of)
    assert together == run(trials, of, hosts=3)
    assert together == run(trials, of, restart_at=5)
    for trial in trials[::6]:
        assert run([trial], of) == {trial.key: together[trial.key]}


def weights_after(rounds: int, trials, of: Problem, hosts: int = 1, device: str = "cpu") -> tuple[np.ndarray, Server]:
    """The trials' weights after some rounds, in the order given, as (trial, feature and constant, class)."""
    server = Server(HostsHere(hosts, device), device)
    server.open(trials, in_process(of))
    server.advance(rounds)
    rows = {t.key: row for t, row in zip(server.trials, server.theta.cpu().numpy(), strict=True)}
    return np.stack([rows[t.key].reshape(of.model.rows, -1) for t in trials]), server


def kernels_of(device: str) -> list[str]:
    """Those that this machine has."""
    own = kernels.OWN[device]
    return [own, "torch"] if kernels._to_be_had(device) else ["torch"]


@contextlib.contextmanager
def computed_with(kernel: str, device: str = "cpu") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels._chosen, device, kernel)
        yield
