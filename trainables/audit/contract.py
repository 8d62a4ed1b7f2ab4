"""The contract of a method, as checks that run on any method: `fedsweep check-method`.

Lanes, hosts and restarts: if these checks fail, results depend on the other trials of the pack or on where a trial
ran. Account, noise and audit: if they fail, the method leaks more than it claims. Reference: if it fails, the server's
step is not what the paper says.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from trainables import methods, models
from trainables.audit import paired, shift_checks
from trainables.audit.neighbouring_data import problem_for
from trainables.errors import UserError
from trainables.federation.hosts import Hosts
from trainables.federation.pack import check
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import TrialSpec
from trainables.methods.base import AUTO, Hyperparameter, Method
from trainables.privacy.plan import ADJACENCIES, RELEASES, Adjacency, Level, PrivacySettings, Release
from trainables.spec import HyperValue

Twin = Callable[..., np.ndarray]
"""Readable reference of the server's step: twin(W, G, t, state, **hyperparameters) -> the weights after round t."""
DATA = "synthetic-frozen:400,80,6,3"
LANES = 21  # not a multiple of any vector width
ROUNDS = 8
AUDITED_ROUNDS = 12
CLAIM = PrivacySettings(epsilon=5.0)  # with the bound for Gaussian releases, a larger eps needs fewer runs
# Secret samples of rows are computed lane by lane, a thousand times slower, and only the weaker bound for any mechanism
# holds. This bound needs fewer runs for a smaller eps. Local steps are left to the noise-shift audit.
SAMPLED_CLAIM = PrivacySettings(epsilon=2.0)
SAMPLED_REPETITIONS = 500
SAMPLED_STEPS: Mapping[str, HyperValue] = {"local_steps": 1, "participation": 1.0}


@dataclass(frozen=True)
class CheckResult:
    check: str
    failure: str = ""
    """What is wrong, in one sentence; empty if the check passed."""


Part = Callable[[Method], str]
"""A part of a check, which can be computed in another process: the failure it finds, or an empty string."""


def run_checks(
    method: Method,
    hyperparameters: Mapping[str, HyperValue],
    twin: Twin | None = None,
    repetitions: int = 1_000,
    on_start: Callable[[str], None] = lambda check: None,
    processes: int = 1,
) -> Iterator[CheckResult]:
    """Run all checks. The method must be registered (`methods.add_all`); other processes load the plug-in that has it.
    `hyperparameters`: a stable configuration, which the checks vary. `on_start`: called with the name of a check before
    its result is awaited. Results and their order do not depend on the number of processes."""
    checks = _checks(method, method.check(hyperparameters), repetitions)
    with _runner(method, checks, processes) as failures:
        for name in checks:
            on_start(name)
            yield CheckResult(name, next(filter(None, failures(name)), ""))
    if twin is not None:
        on_start(name := "steps like its reference")
        yield CheckResult(name, _failure(partial(_check_twin, base=method.check(hyperparameters), twin=twin), method))


def _checks(method: Method, base: Mapping[str, HyperValue], repetitions: int) -> dict[str, list[Part]]:
    """The parts of every check. A check fails with the failure of its first part that fails."""
    checks: dict[str, list[Part]] = {
        "has a complete description and refuses bad values": [_check_description],
        "actual eps is at most the claimed eps": [partial(_check_account, base=base)],
        "runs to the last round with finite weights": [partial(_check_finite, base=base)],
        "a lane alone and in a pack give identical bits": [partial(_check_alone, base=base)],
        "the order of lanes does not matter": [partial(_check_same, base=base, reverse=True)],
        "the number of hosts does not matter": [partial(_check_same, base=base, hosts=3)],
        "a restart from a checkpoint changes nothing": [partial(_check_same, base=base, restart_at=5)],
    }
    for level in method.levels:
        checks[f"noise hides every {level} as accounted"] = [
            partial(shift_checks.failure_of, case=case) for case in shift_checks.cases(method, base, level)
        ]
    for level in method.levels:
        checks[f"releases reveal no more than is claimed, {level} level"] = [
            partial(_check_leak, base=base, level=level, adjacency=adjacency, release=release, repetitions=repetitions)
            for adjacency, release in itertools.product(ADJACENCIES, RELEASES)
        ]
        checks[f"half the noise would be detected, {level} level"] = [
            partial(_check_power, level=level, repetitions=repetitions)
        ]
    return checks


@contextlib.contextmanager
def _runner(
    method: Method, checks: Mapping[str, Sequence[Part]], processes: int
) -> Iterator[Callable[[str], Iterator[str]]]:
    """A function that gives the failures of a check, part by part. With one process, parts are computed here, when
    they are asked for; otherwise all at once in other processes."""
    if processes == 1:
        yield lambda name: (_failure(part, method) for part in checks[name])
        return
    with _safe_path():
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_the_parent)
        started = {
            name: [pool.submit(_failure_of, part, method.name) for part in parts] for name, parts in checks.items()
        }
    try:
        yield lambda name: (part.result() for part in started[name])
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """In another process: exit, also in the middle of a check, when the process that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """A Python that is started in this block does not import from the current folder, where other people may have
    put files. Once it runs, it gets the search path of this process."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _failure_of(part: Part, method: str) -> str:
    """`_failure` in another process, which loads the plug-in of the method."""
    return _failure(part, methods.get(method))


def _failure(part: Part, method: Method) -> str:
    try:
        return part(method)
    except (UserError, NotImplementedError) as error:
        return str(error)
    except Exception as error:  # any exception of the method is a failure
        return f"{type(error).__name__}: {error}"


# ---- the problem and the trials


def _mixed_trials(method: Method, base: Mapping[str, HyperValue]) -> tuple[list[TrialSpec], Problem]:
    """Lanes that differ in seed, clip, eps and every real-valued hyperparameter that may differ within a pack."""
    problem = problem_for(method, DATA, clients=5)
    rng = np.random.default_rng(1)
    trials = []
    for _ in range(LANES):
        hypers = dict(base)
        for h in method.hyperparameters:
            value = hypers[h.name]
            if h.static or h.boolean or isinstance(value, bool | str) or h.integer:
                continue
            changed = float(value) * float(rng.uniform(0.5, 1.0)) if value else value
            hypers[h.name] = h.check(changed) if _is_allowed(h, changed) else value
        privacy = PrivacySettings(
            epsilon=float(rng.choice([1.0, 8.0, math.inf])),
            clip=float(rng.choice([1.0, 5.0])),
            level=method.levels[0],
        )
        trials.append(_trial(method, problem, hypers, privacy, int(rng.choice([7, 42, 123]))))
    return list({trial.key: trial for trial in trials}.values()), problem


def _is_allowed(h: Hyperparameter, value: HyperValue) -> bool:
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
    """All results of the trials except timings."""
    server = Server(Hosts(hosts), "cpu")
    server.open(trials, ProblemData.of(problem))
    if restart_at is not None:
        server.advance(restart_at)
        saved = server.checkpoint()
        server = Server(Hosts(hosts), "cpu")
        with _new_instance(trials[0].method):
            server.open(trials, ProblemData.of(problem), saved)
    server.advance(ROUNDS - 1)
    weights = {t.key: row.numpy().tobytes() for t, row in zip(server.trials, server.theta, strict=True)}
    server.advance(ROUNDS)
    return {
        key: (result.state, result.rounds, repr(result.metrics), result.correct, weights.get(key))
        for key, result in server.results.items()
    }


@contextlib.contextmanager
def _new_instance(name: str) -> Iterator[None]:
    """Replace the method by a new instance without state, as a new process would."""
    original = methods.METHODS[name]
    methods.METHODS[name] = type(original)()
    try:
        yield
    finally:
        methods.METHODS[name] = original


# ---- the checks: each returns its failure, or an empty string


def _check_description(method: Method) -> str:
    for attribute in ("name", "title", "paper", "hyperparameters"):
        if not getattr(method, attribute, None):
            return f"it has no {attribute}"
    if methods.METHODS.get(method.name) is not method:
        return f"the name {method.name!r} belongs to another method"
    names = [h.name for h in method.hyperparameters]
    if len(set(names)) != len(names):
        return "two hyperparameters have the same name"
    for h in method.hyperparameters:
        if not h.description:
            return f"hyperparameter {h.name} has no description"
        h.check(h.default)
        bad_values: list[HyperValue] = ["nonsense"] if h.choices or h.boolean else ["nonsense", math.nan]
        for bad in bad_values:
            if bad != AUTO and _is_allowed(h, bad):
                return f"hyperparameter {h.name} accepts {bad!r}"
    return ""


def _check_account(method: Method, base: Mapping[str, HyperValue]) -> str:
    trials, problem = _mixed_trials(method, base)
    for trial in trials:
        plan = check(trial, problem)
        claimed, actual = trial.privacy.epsilon, plan.actual_epsilon[trial.privacy.release]
        if math.isfinite(claimed) and not actual <= claimed * (1 + 1e-6):
            return f"eps {claimed:g} is claimed and {actual:.4g} is the actual eps, with {trial.hyperparameters}"
        if math.isfinite(claimed) and not any(std > 0 for std in plan.noise_std.values()):
            return "a finite eps is claimed and no noise is added"
    return ""


def _check_finite(method: Method, base: Mapping[str, HyperValue]) -> str:
    trials, problem = _mixed_trials(method, base)
    results = _run(trials, problem)
    for trial in trials:
        if results[trial.key][0] != "done":
            return f"it diverged with {trial.hyperparameters}; pass a stable configuration with --set"
    return ""


def _check_alone(method: Method, base: Mapping[str, HyperValue]) -> str:
    trials, problem = _mixed_trials(method, base)
    together = _run(trials, problem)
    for trial in trials[::4]:
        if _run([trial], problem)[trial.key] != together[trial.key]:
            return f"a lane alone gives other results than in a pack, with {trial.hyperparameters}"
    return ""


def _check_same(method: Method, base: Mapping[str, HyperValue], reverse: bool = False, **options: int) -> str:
    trials, problem = _mixed_trials(method, base)
    other = trials[::-1] if reverse else trials
    return "" if _run(trials, problem) == _run(other, problem, **options) else "the results differ"


def _check_leak(
    method: Method,
    base: Mapping[str, HyperValue],
    level: Level,
    adjacency: Adjacency,
    release: Release,
    repetitions: int,
) -> str:
    """A paired audit at one eps; `fedsweep audit` can use any other."""
    claim, hypers = CLAIM, dict(base)
    if _samples_rows(method, base, level):
        claim, repetitions = SAMPLED_CLAIM, min(repetitions, SAMPLED_REPETITIONS)
        hypers |= {name: value for name, value in SAMPLED_STEPS.items() if name in base}
    claim = claim.model_copy(update={"level": level, "adjacency": adjacency, "release": release})
    result = paired.audit(
        method.name, claim, hypers, model=_small_model(method), rounds=AUDITED_ROUNDS, repetitions=repetitions
    )
    if not result.caught:
        return ""
    return f"eps {claim.epsilon:g} is claimed, but eps is at least {result.epsilon:.3g} ({adjacency}, {release})"


def _samples_rows(method: Method, base: Mapping[str, HyperValue], level: Level) -> bool:
    problem = problem_for(method)
    plan = check(_trial(method, problem, base, CLAIM.model_copy(update={"level": level}), seed=0), problem)
    return any(event.sampling < 1 for event in plan.events)


def _check_power(method: Method, level: Level, repetitions: int) -> str:
    claim, model = CLAIM.model_copy(update={"level": level}), _small_model(method)
    result = paired.audit(method.name, claim, {}, model=model, repetitions=4 * repetitions, noise_factor=0.5)
    if result.caught or result.sampled:
        return ""
    return (
        f"with half the noise only eps {result.epsilon:.3g} was measured in {4 * repetitions} repetitions: the method "
        "adds noise that its account does not use, or the audit needs more repetitions"
    )


def _small_model(method: Method) -> str:
    """The first model for two classes that the method accepts."""
    for name in ("softmax", "logistic", "mlp:4"):
        if method.accepts(models.parse(name, features=1, classes=2)):
            return name
    raise UserError(f"{method.name} accepts none of the packaged models")


def _check_twin(method: Method, base: Mapping[str, HyperValue], twin: Twin) -> str:
    """Three lanes through ten rounds of random releases in float32, compared with the twin in float64."""
    problem = problem_for(method, DATA, clients=5)
    rng, lanes, d = np.random.default_rng(3), 3, problem.model.dimension
    privacy = PrivacySettings(epsilon=2.0, level=method.levels[0])
    resolved = method.resolve(dict(base), privacy)
    hypers: dict[str, Any] = {
        h.name: resolved[h.name] if h.static else torch.full((lanes, 1), float(resolved[h.name]))
        for h in method.hyperparameters
    }
    hypers |= {
        "clip": torch.full((lanes, 1), privacy.clip),
        "level": privacy.level,
        "rounds": 10,
        "model": problem.model,
        "clipping": privacy.clipping,
    }
    theta = torch.from_numpy(rng.normal(size=(lanes, d)).astype(np.float32))
    reference = theta.numpy().astype(np.float64)
    state = method.initial_state(theta, hypers)
    states: list[dict[str, Any]] = [{} for _ in range(lanes)]
    for t in range(1, 11):
        G = rng.normal(size=(lanes, d)).astype(np.float32)
        theta = method.step(t, theta, torch.from_numpy(G), state, hypers)
        reference = np.stack(
            [twin(reference[i], G[i].astype(np.float64), t, states[i], **resolved) for i in range(lanes)]
        )
        error = float(np.abs(theta.numpy() - reference).max() / max(1.0, np.abs(reference).max()))
        if not error <= 1e-5 * t:
            return f"after round {t} the weights differ by {error:.2g} of their size"
    return ""
