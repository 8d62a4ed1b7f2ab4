"""What every method must keep, as checks that run on anybody's: `fedsweep check-method`.

A method that breaks one of the first group gives results that depend on the company a trial ran in, or on where it ran;
one that breaks the last leaks more than its account says.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainables import methods
from trainables.audit import paired
from trainables.data import features
from trainables.data import partition as partitions
from trainables.errors import UserError
from trainables.federation.pack import check
from trainables.federation.problem import Problem, in_process
from trainables.federation.server import HostsHere, Server
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.methods.base import AUTO, Hyperparameter, Method
from trainables.privacy.plan import PrivacySettings
from trainables.spec import HyperValue

Twin = Callable[..., np.ndarray]
"""The server's step, written for reading: twin(W, G, t, state, **hyperparameters) -> the weights after round t."""
LANES = 21  # full vectors of any width, and a rest
ROUNDS = 8


@dataclass(frozen=True)
class Finding:
    """What became of a check: no complaint, or a sentence."""

    check: str
    complaint: str = ""


def examine(
    method: Method,
    hyperparameters: Mapping[str, HyperValue],
    twin: Twin | None = None,
    repetitions: int = 4_000,
    begins: Callable[[str], None] = lambda check: None,
) -> Iterator[Finding]:
    """Every check, one after the other; the method must be known by its name (`methods.add_all`). `hyperparameters`: a
    setting under which it is stable, from which the checks vary it. `begins`: told of a check before it runs."""
    base = method.check(hyperparameters)
    problem = _problem(method)
    trials = _varied(method, problem, base)
    checks: dict[str, Callable[[], str]] = {
        "describes itself and refuses bad values": lambda: _describes(method),
        "buys what it claims, by its account": lambda: _account(trials, problem),
        "runs to its end with finite weights": lambda: _runs(trials, problem),
        "one lane is many lanes, to the last bit": lambda: _alone(trials, problem),
        "the order of lanes does not matter": lambda: _same(trials, problem, order=True),
        "one host is many hosts": lambda: _same(trials, problem, hosts=3),
        "a restart from a snapshot changes nothing": lambda: _same(trials, problem, restart_at=5),
        "releases tell no more than is claimed": lambda: _leaks(method, base, repetitions, 1.0),
        "and half the noise would be caught": lambda: _leaks(method, base, repetitions, 0.5),
    }
    if twin is not None:
        checks["steps as its twin does"] = lambda: _agrees(method, problem, base, twin)
    for name, run in checks.items():
        begins(name)
        try:
            yield Finding(name, run())
        except (UserError, NotImplementedError) as error:
            yield Finding(name, str(error))
        except Exception as error:  # whatever the method does wrong
            yield Finding(name, f"{type(error).__name__}: {error}")


# ---- what they run on


def _problem(method: Method) -> Problem:
    """400 rows of 6 features, dealt to 5 clients; with a head that the method accepts."""
    data = features.load("synthetic-frozen:400,80,6,3")
    for model in ("softmax", "multinomial", "mlp:4"):
        spec = ProblemSpec(
            data=DataSpec(fingerprint=data.fingerprint),
            partition=partitions.parse("dirichlet:5", clients=5, seed=42),
            train_on="all",
            evaluate_on="test",
            model=model,
        )
        problem = Problem.prepare(data, spec)
        if method.accepts(problem.model):
            return problem
    raise UserError(f"{method.name} accepts none of the packaged heads")


def _varied(method: Method, problem: Problem, base: Mapping[str, HyperValue]) -> list[TrialSpec]:
    """A mixed pack: lanes differ in every number that may differ in a pack, in seed, clip and budget."""
    rng = np.random.default_rng(1)
    trials = []
    for _ in range(LANES):
        hypers = dict(base)
        for h in method.hyperparameters:
            value = hypers[h.name]
            if h.static or h.boolean or isinstance(value, bool | str) or h.integer:
                continue
            moved = float(value) * float(rng.uniform(0.5, 1.0)) if value else value
            hypers[h.name] = h.check(moved) if _allowed(h, moved) else value
        privacy = PrivacySettings(
            epsilon=float(rng.choice([1.0, 8.0, math.inf])),
            clip=float(rng.choice([1.0, 5.0])),
            level=method.levels[0],
        )
        trials.append(_trial(method, problem, hypers, privacy, int(rng.choice([7, 42, 123]))))
    return list({trial.key: trial for trial in trials}.values())


def _allowed(h: Hyperparameter, value: HyperValue) -> bool:
    try:
        h.check(value)
    except UserError:
        return False
    return True


def _trial(
    method: Method, problem: Problem, hypers: Mapping[str, HyperValue], privacy: PrivacySettings, seed: int
) -> TrialSpec:
    return TrialSpec(
        problem=problem.spec,
        method=method.name,
        hyperparameters=dict(hypers),
        privacy=privacy,
        rounds=ROUNDS,
        evaluate_every=4,
        seed=seed,
    )


def _run(
    trials: Sequence[TrialSpec], problem: Problem, hosts: int = 1, restart_at: int | None = None
) -> dict[str, tuple[Any, ...]]:
    """All that the trials leave behind, but for the time they took."""
    server = Server(HostsHere(hosts), "cpu")
    server.open(trials, in_process(problem))
    if restart_at is not None:
        server.advance(restart_at)
        saved = server.snapshot()
        server = Server(HostsHere(hosts), "cpu")
        with _as_in_a_new_process(trials[0].method):
            server.open(trials, in_process(problem), saved)
    server.advance(ROUNDS - 1)
    weights = {t.key: row.numpy().tobytes() for t, row in zip(server.trials, server.theta, strict=True)}
    server.advance(ROUNDS)
    return {
        key: (result.state, result.rounds, repr(result.metrics), result.correct, weights.get(key))
        for key, result in server.results.items()
    }


@contextlib.contextmanager
def _as_in_a_new_process(name: str) -> Iterator[None]:
    """With an instance of the method that remembers nothing."""
    before = methods.METHODS[name]
    methods.METHODS[name] = type(before)()
    try:
        yield
    finally:
        methods.METHODS[name] = before


# ---- the checks: each returns its complaint


def _describes(method: Method) -> str:
    for attribute in ("name", "title", "paper", "hyperparameters"):
        if not getattr(method, attribute, None):
            return f"it has no {attribute}"
    if methods.METHODS.get(method.name) is not method:
        return f"the name {method.name!r} belongs to another method"
    names = [h.name for h in method.hyperparameters]
    if len(set(names)) != len(names):
        return "two hyperparameters have one name"
    for h in method.hyperparameters:
        if not h.description:
            return f"hyperparameter {h.name} has no description"
        h.check(h.default)
        bad_values: list[HyperValue] = ["nonsense"] if h.choices or h.boolean else ["nonsense", math.nan]
        for bad in bad_values:
            if bad != AUTO and _allowed(h, bad):
                return f"hyperparameter {h.name} accepts {bad!r}"
    return ""


def _account(trials: Sequence[TrialSpec], problem: Problem) -> str:
    for trial in trials:
        plan = check(trial, problem)
        claimed, actual = trial.privacy.epsilon, plan.actual_epsilon[trial.privacy.release]
        if math.isfinite(claimed) and not actual <= claimed * (1 + 1e-6):
            return f"eps {claimed:g} is claimed and {actual:.4g} is the actual eps, with {trial.hyperparameters}"
        if math.isfinite(claimed) and not any(std > 0 for std in plan.noise_std.values()):
            return "a finite eps is claimed and no noise is added"
    return ""


def _runs(trials: Sequence[TrialSpec], problem: Problem) -> str:
    ended = _run(trials, problem)
    for trial in trials:
        if ended[trial.key][0] != "done":
            return f"it diverged with {trial.hyperparameters}; give a calmer setting with --set"
    return ""


def _alone(trials: Sequence[TrialSpec], problem: Problem) -> str:
    together = _run(trials, problem)
    for trial in trials[::4]:
        if _run([trial], problem)[trial.key] != together[trial.key]:
            return f"alone it computes something else than in a pack, with {trial.hyperparameters}"
    return ""


def _same(trials: Sequence[TrialSpec], problem: Problem, *, order: bool = False, **changed: int) -> str:
    other = trials[::-1] if order else trials
    return "" if _run(trials, problem) == _run(other, problem, **changed) else "the results differ"


def _leaks(method: Method, base: Mapping[str, HyperValue], repetitions: int, factor: float) -> str:
    """At one budget; `fedsweep audit` tries others."""
    privacy = PrivacySettings(epsilon=2.0, delta=1e-5, level=method.levels[0])
    found = paired.audit(method.name, privacy, base, repetitions=repetitions, noise_factor=factor)
    if factor == 1 and found.caught:
        return f"eps 2 is claimed, and at least {found.epsilon:.3g} was seen"
    if factor < 1 and not found.caught and not found.sampled:
        return (
            f"with {factor:g} of the noise only eps {found.epsilon:.3g} was seen in {repetitions} repetitions: is "
            "there noise that costs nothing, or were they too few?"
        )
    return ""


def _agrees(method: Method, problem: Problem, base: Mapping[str, HyperValue], twin: Twin) -> str:
    """Three lanes through ten rounds of made-up releases, in float32, beside the twin in float64."""
    rng, lanes, d = np.random.default_rng(3), 3, problem.model.dimension
    privacy = PrivacySettings(epsilon=2.0, level=method.levels[0])
    resolved = method.resolve(dict(base), privacy)
    hypers: dict[str, Any] = {
        h.name: resolved[h.name] if h.static else torch.full((lanes, 1), float(resolved[h.name]))
        for h in method.hyperparameters
    }
    hypers |= {"level": privacy.level, "rounds": 10, "model": problem.model, "clipping": privacy.clipping}
    theta = torch.from_numpy(rng.normal(size=(lanes, d)).astype(np.float32))
    slow = theta.numpy().astype(np.float64)
    state = method.initial_state(theta, hypers)
    states: list[dict[str, Any]] = [{} for _ in range(lanes)]
    for t in range(1, 11):
        G = rng.normal(size=(lanes, d)).astype(np.float32)
        theta = method.step(t, theta, torch.from_numpy(G), state, hypers)
        slow = np.stack([twin(slow[i], G[i].astype(np.float64), t, states[i], **resolved) for i in range(lanes)])
        off = float(np.abs(theta.numpy() - slow).max() / max(1.0, np.abs(slow).max()))
        if not off <= 1e-5 * t:
            return f"after round {t} the weights are off by {off:.2g} of their size"
    return ""
