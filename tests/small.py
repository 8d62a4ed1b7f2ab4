"""Small problems and trials, and functions that run them in this process."""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from trainables import methods
from trainables.data import features
from trainables.data import partition as partitions
from trainables.federation.hosts import Hosts
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.methods import METHODS
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
    """A trial with the method's defaults, except for the given values."""
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
    """Everything a trial produces, bit for bit, except its duration."""

    state: str
    rounds: int
    metrics: str
    correct: bytes
    weights: bytes
    """After the last round but one: the server drops a lane when it is done."""


def run(
    trials, of: Problem, *, hosts: int = 1, restart_at: int | None = None, device: str = "cpu"
) -> dict[str, Outcome]:
    """Run a pack in this process; after round `restart_at` a new server resumes from a checkpoint."""
    data = ProblemData.of(of)
    server = Server(Hosts(hosts, device), device)
    server.open(trials, data)
    if restart_at:
        server.advance(restart_at)
        saved = server.checkpoint()
        server = Server(Hosts(hosts, device), device)
        server.open(trials, data, saved)
    server.advance(server.rounds - 1)
    weights = {t.key: row.cpu().numpy().tobytes() for t, row in zip(server.trials, server.theta, strict=True)}
    server.advance(server.rounds)
    return {
        key: Outcome(r.state, r.rounds, repr(r.metrics), r.correct, weights.get(key, b""))
        for key, r in server.results.items()
    }


def assert_same_bits(trials, of: Problem) -> None:
    """Results are the same together or alone, on one host or three, with a restart or without."""
    together = run(trials, of)
    assert together == run(trials, of, hosts=3)
    assert together == run(trials, of, restart_at=5)
    for trial in trials[::6]:
        assert run([trial], of) == {trial.key: together[trial.key]}


def weights_after(rounds: int, trials, of: Problem, hosts: int = 1, device: str = "cpu") -> tuple[np.ndarray, Server]:
    """The trials' weights after some rounds, in the order given, as (trial, feature and constant, class)."""
    server = Server(Hosts(hosts, device), device)
    server.open(trials, ProblemData.of(of))
    server.advance(rounds)
    rows = {t.key: row for t, row in zip(server.trials, server.theta.cpu().numpy(), strict=True)}
    return np.stack([rows[t.key].reshape(of.model.rows, -1) for t in trials]), server


def kernels_of(device: str) -> list[str]:
    """The kernels that this machine has."""
    own = kernels.OWN[device]
    return [own, "torch"] if kernels._available(device) else ["torch"]


@contextlib.contextmanager
def computed_with(kernel: str, device: str = "cpu") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels._chosen, device, kernel)
        yield


def shared_values(name: str) -> dict:
    """The hyperparameters that all trials of a pack share, with values that have an effect: more than one local step,
    and a bound on Hessians below any damping times |D_i|."""
    effective = {"local_steps": 2, "sampling_rate": 0.3, "participation": 0.6, "hessian_clip": 0.01}
    return {h.name: effective.get(h.name, h.default) for h in METHODS[name].hyperparameters if h.shared}


def varied_trials(name: str, of, count: int) -> list:
    """Trials that differ in every hyperparameter, in seed, budget and clip: a mixed pack, the same at every call."""
    rng = np.random.default_rng(1)
    method, trials = METHODS[name], []
    for number in range(count):
        hypers = shared_values(name)
        for h in method.hyperparameters:
            if h.name in hypers:
                continue
            if h.choices:  # lanes with the same choice form a group: one large group and some small ones
                hypers[h.name] = str(rng.choice(h.choices)) if number % 5 == 0 else h.choices[0]
            elif h.name.endswith("learning_rate"):
                hypers[h.name] = float(10 ** rng.uniform(-1.5, 0.5))
            elif h.integer:
                hypers[h.name] = int(rng.integers(0, 9))
            elif h.auto:
                hypers[h.name] = bool(rng.integers(2))
            elif h.high == 1:
                hypers[h.name] = float(rng.uniform(0.5, 0.999))
            elif h.name == "smallest_eigenvalue":  # a Newton step on a noisy Hessian near zero overflows
                hypers[h.name] = float(10 ** rng.uniform(-0.5, 0))
            else:
                hypers[h.name] = float(10 ** rng.uniform(-3, 0))
        privacy = {"epsilon": float(rng.choice([0.5, 1, 8, math.inf])), "clip": float(rng.choice([1, 5, 10]))}
        trials.append(trial(of, name, hypers, seed=int(rng.choice([7, 42, 123])), **privacy))
    return trials
