"""The runs of a method that the noise-shift audit makes: every level, adjacency and release model, with weights that
hardly move, with the given hyperparameters, with large steps, over many rounds, at other eps, and with every option
that the method supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainables.audit.neighbouring_data import Neighbours, pairs, problem_for
from trainables.audit.noise_shift import SLACK, Shift, ShiftError, find_shift
from trainables.audit.paired import from_zero, most_visible
from trainables.errors import UserError
from trainables.federation.pack import check
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import Preprocess, TrialSpec
from trainables.methods.base import Method
from trainables.privacy.plan import ADJACENCIES, RELEASES, Level, PrivacySettings
from trainables.spec import HyperValue

ROUNDS = 13
MANY_ROUNDS = 61
LARGE, LARGE_STEPS = "large steps", 30.0  # times the given learning rates
CLAIM = PrivacySettings(epsilon=2.0, clip=1.0)
OTHER_EPSILONS = (0.5, 8.0)
LOCAL, SUMMED = RELEASES
REPLACED, ZEROED = ADJACENCIES


@dataclass(frozen=True)
class Case:
    """A run, and the pairs of neighbouring data sets to try it on."""

    name: str
    hyperparameters: Mapping[str, HyperValue]
    privacy: PrivacySettings
    rounds: int = ROUNDS
    numbers: tuple[int, ...] | None = None
    """The indices of the pairs in `pairs`; None: all."""
    options: Mapping[str, Any] | None = None
    """Further settings of the trial."""
    zero: bool = False
    """Whether weights start at zero, where records are most visible."""


def cases(method: Method, base: Mapping[str, HyperValue], level: Level) -> Iterator[Case]:
    visible = method.check({**base, **most_visible(method.name, level)})
    rates = [name for name in base if name.endswith("learning_rate")]
    large = method.check({**base, **{name: LARGE_STEPS * float(base[name]) for name in rates}})
    claims = {
        (adjacency, release): CLAIM.model_copy(update={"level": level, "adjacency": adjacency, "release": release})
        for adjacency in ADJACENCIES
        for release in RELEASES
    }
    for (_, release), claim in claims.items():
        numbers = None if release == LOCAL else (0, -1)
        yield Case("small steps", visible, claim, numbers=numbers, zero=True)
    for (_, release), claim in claims.items():
        yield Case("given steps", base, claim, numbers=(0, -3, -1) if release == LOCAL else (0,))
    for (_, release), claim in claims.items():
        yield Case(LARGE, large, claim, numbers=(0, 1) if release == LOCAL else (0,))
    yield Case("many rounds", visible, claims[REPLACED, LOCAL], MANY_ROUNDS, (0,), zero=True)
    for epsilon in OTHER_EPSILONS:  # noise may depend on it
        claim = claims[REPLACED, LOCAL].model_copy(update={"epsilon": epsilon})
        yield Case(f"eps {epsilon:g}", visible, claim, numbers=(0,), zero=True)
    for adjacency, release in ((REPLACED, LOCAL), (ZEROED, SUMMED)):
        claim = claims[adjacency, release]
        for name, changed, options in (
            ("automatic clipping", {"clipping": "automatic"}, {}),
            ("adaptive clipping", {"clipping": "adaptive"}, {}),
            ("secret participation", {"secret_participation": 0.6}, {}),
            ("size weights", {}, {"aggregate": "size"}),
            ("centred features", {}, {"preprocess": Preprocess(center=0.2, bound=1.0)}),
            ("scaled features", {}, {"preprocess": Preprocess(center=0.2, bound=8.0, scale=0.1, shrink=True)}),
        ):
            yield Case(name, base, claim.model_copy(update=changed), numbers=(0,), options=options)


def failure(method: Method, base: Mapping[str, HyperValue], level: Level) -> str:
    """The first case in which the releases reveal more than the account says; empty if there is none."""
    return next(filter(None, (failure_of(method, case) for case in cases(method, base, level))), "")


def failure_of(method: Method, case: Case) -> str:
    """What the releases reveal in this case beyond the account; empty if nothing, or if the method does not have the
    option."""
    problem, privacy = problem_for(method), case.privacy
    trial = TrialSpec(
        problem=problem.spec,
        method=method.name,
        hyperparameters=dict(case.hyperparameters),
        privacy=privacy,
        rounds=case.rounds,
        evaluate_every=case.rounds,
        seed=3,
        **(case.options or {}),
    )
    try:
        check(trial, problem)
    except UserError as error:
        return str(error) if case.name in ("small steps", "given steps") else ""
    found = _run(problem, trial, case)
    return f"{found} ({case.name}, {privacy.adjacency}, {privacy.release})" if found else ""


def _run(problem: Problem, trial: TrialSpec, case: Case) -> str:
    everything = list(pairs(problem, case.privacy.level, case.privacy.adjacency))
    for pair in everything if case.numbers is None else _chosen(everything, case.numbers):
        data, other = pair.data, pair.other
        if case.zero:
            model = from_zero(problem.model)
            data, other = replace(data, model=model), None if other is None else replace(other, model=model)
        try:
            shift = find_shift(trial, data, other, pair.client)
        except ShiftError as error:
            return f"{pair.name}: {error}"
        if shift.diverged and case.name != LARGE:
            return f"{pair.name}: the weights of round {shift.diverged} are not finite; set stable values with --set"
        if pair.limited and (excess := _excess(shift, trial)):
            return f"{pair.name}: {excess}"
    return ""


def _chosen(everything: Sequence[Neighbours], numbers: Sequence[int]) -> list[Neighbours]:
    return [everything[number] for number in dict.fromkeys(number % len(everything) for number in numbers)]


def _excess(shift: Shift, trial: TrialSpec) -> str:
    release = trial.privacy.release
    for event in shift.plan.events:
        found, allowed = shift.cost.get(event.purpose, 0.0) ** 0.5, shift.plan.mu_of(event, release)
        if not found <= SLACK * allowed:
            return f"the releases of purpose {event.purpose!r} have mu {found:.4g}, and the account says {allowed:.4g}"
    return ""
