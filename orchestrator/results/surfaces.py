"""The surfaces of a study that was searched by the strategy `surface`, and what they predict for any budget."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from orchestrator.results.ledger import Ledger, Row
from orchestrator.results.searches import SearchRecord, configuration_of, search_records
from orchestrator.search.surface.batches import highest
from orchestrator.search.surface.lattice import Lattice
from orchestrator.search.surface.model import Between, Expected, Surface, Trial, log_noise, trial_noise
from orchestrator.study.cell_id import CellId
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.study import Study
from search_spaces import Configuration
from trainables.choices import Release
from trainables.errors import UserError
from trainables.privacy.gaussian import mu_of

MARGIN = 0.005
"""How far beyond the noise of the searched budgets the surface still predicts, in decades."""
CURVE = 25
"""Number of evenly spaced budgets (in log eps) of a curve, to which the searched ones are added."""
_mu = cache(mu_of)


@dataclass(frozen=True)
class Result:
    """A trial that finished or diverged."""

    budget: int
    """Index in `StudySurface.epsilons`."""
    stage: str
    row: Row
    score: float | None
    """The study's objective; None if the trial diverged."""


@dataclass(frozen=True)
class Point:
    """The best configuration at a budget, according to the surface."""

    epsilon: float
    noise: float
    """Noise multiplier of a round."""
    configuration: Configuration
    score: float
    deviation: float
    """Standard deviation of the expected score."""
    searched: bool
    """Whether the study has trials at this budget."""


@dataclass(frozen=True)
class Finalist:
    """A configuration of a contest: what the surface of the search predicted, and the mean over the contest seeds."""

    epsilon: float
    configuration: Configuration
    predicted: float
    deviation: float
    score: float
    error: float
    """Standard error of `score`."""


@dataclass(frozen=True)
class StudySurface:
    """A method in a setting, over all its budgets."""

    study: Study
    setting: str
    method: MethodSettings
    epsilons: tuple[float, ...]
    """The searched budgets."""
    validation_rows: int
    results: tuple[Result, ...]
    """Results of the search and the contests."""

    @cached_property
    def lattice(self) -> Lattice:
        space, values = self.method.space(), self.study.search.surface.values
        tried = [configuration_of(result.row.content, space) for result in self.results]
        save = self.study.packs_save_time(self.method)
        beyond = Lattice(space, values, packs_save_time=save).steps_beyond(tried)
        return Lattice(space, values, beyond, packs_save_time=save)

    @cached_property
    def surface(self) -> Surface:
        """Fitted to all trials."""
        return self._fitted(self.results)

    @cached_property
    def of_search(self) -> Surface:
        """Fitted to the trials before the contest."""
        return self._fitted([result for result in self.results if result.stage != "contest"])

    def _fitted(self, results: Sequence[Result]) -> Surface:
        objective, space = self.study.objective_spec, self.method.space()
        points = self.lattice.coordinates([configuration_of(result.row.content, space) for result in results]).tolist()
        trials = []
        for result, point in zip(results, points, strict=True):
            good = None if result.score is None else -objective.cost(result.score)
            noise = log_noise(self._noise_of(result.row))
            trials.append(Trial(point, noise, result.row.trial.seed, result.budget, good))
        percent = bool(objective.unit)
        deviation = trial_noise(self.validation_rows, percent)
        return Surface(trials, self.lattice.is_numeric, unit=1.0 if percent else None, deviation=deviation)

    def _noise_of(self, row: Row) -> float:
        """The noise multiplier of a round of this trial."""
        return math.sqrt(row.trial.rounds) / _mu(row.epsilon_unsampled, self.study.privacy.delta)

    def _searched_noise(self, rounds: int) -> list[float]:
        """The noise multiplier of every searched budget with this number of rounds."""
        own = self.study.privacy
        return [self._noise(epsilon, own.delta, own.release, rounds) for epsilon in self.epsilons]

    @cached_property
    def _sampling_credit(self) -> tuple[list[float], list[float]]:
        """For the searched budgets: log eps, and mu without amplification by sampling divided by the claimed mu (1
        without sampling)."""
        firsts = {each.budget: each.row for each in reversed(self.results) if math.isfinite(each.row.epsilon_claimed)}
        delta = self.study.privacy.delta
        found = sorted(
            (math.log(row.epsilon_claimed), _mu(row.epsilon_unsampled, delta) / _mu(row.epsilon_claimed, delta))
            for row in firsts.values()
        )
        return [at for at, _ in found], [credit for _, credit in found]

    def _noise(self, epsilon: float, delta: float, release: Release, rounds: int) -> float:
        """The noise multiplier of a round, in the study's release model. `release`: the model that eps refers to."""
        mu = _mu(epsilon, delta)
        if math.isinf(mu):
            return 0.0
        own = self.study.privacy.release
        if release != own:
            row = next((each.row for each in self.results if math.isfinite(each.row.epsilon_claimed)), None)
            if row is None:
                raise UserError(
                    f"release = {release!r}: the study has no finite epsilon from which to convert its noise"
                )
            local, secure = (_mu(e, self.study.privacy.delta) for e in (row.epsilon_local, row.epsilon_secure))
            mu *= local / secure if release == "secure-aggregation" else secure / local
        credit = float(np.interp(math.log(epsilon), *self._sampling_credit)) if self._sampling_credit[0] else 1.0
        return math.sqrt(rounds) / (mu * credit)

    def at(
        self,
        epsilon: float,
        delta: float | None = None,
        release: Release | None = None,
        rounds: int | None = None,
    ) -> Point:
        """The best configuration at a budget and its expected score on the validation rows. `delta`, `release` and
        `rounds` are the study's by default."""
        delta, claimed_release = delta or self.study.privacy.delta, release or self.study.privacy.release
        counts = self._rounds
        self._check_rounds(rounds)
        noise = {count: self._noise(epsilon, delta, claimed_release, count) for count in set(counts.tolist())}
        configurations = self.lattice.configurations
        is_own = epsilon in self.epsilons and delta == self.study.privacy.delta
        budget = self.epsilons.index(epsilon) if is_own and claimed_release == self.study.privacy.release else -1
        asked = sorted(noise) if rounds is None else [rounds]
        covered = [count for count in asked if self._covers(noise[count], count)]
        usable = np.isin(counts, covered)
        if not covered:
            searched, budgets = self._searched_noise(asked[-1]), self.budgets(delta, claimed_release)
            known = f" (eps {max(budgets):.3g} to {min(budgets):.3g})" if budgets else ""
            raise UserError(
                f"epsilon = {epsilon:g} needs a noise multiplier of {noise[asked[-1]]:.3g}; {self.method.shown} was "
                f"searched from {min(searched):.3g} to {max(searched):.3g}{known}"
            )
        score, deviation, cautious = (np.full(len(configurations), -math.inf) for _ in range(3))
        for count in sorted(noise):  # runs of other lengths have other noise
            own = np.flatnonzero(usable & (counts == count))
            if len(own):
                found = self._expected(self.lattice.points[own], budget, noise[count], count)
                score[own], deviation[own], cautious[own] = found
        (index,) = highest(cautious, 1)
        sign = -1.0 if self.study.objective_spec.lower_is_better else 1.0
        chosen = configurations[index]
        return Point(
            epsilon,
            noise[int(counts[index])],
            chosen,
            sign * float(score[index]),
            float(deviation[index]),
            budget >= 0,
        )

    def budgets(self, delta: float | None = None, release: Release | None = None) -> list[float]:
        """The finite searched budgets, as eps for another delta or release model with the same noise."""
        own = self.study.privacy
        finite = sorted(epsilon for epsilon in self.epsilons if math.isfinite(epsilon))
        if (delta or own.delta, release or own.release) == (own.delta, own.release):
            return finite
        return [self._with_noise_of(epsilon, delta or own.delta, release or own.release) for epsilon in finite]

    def _with_noise_of(self, epsilon: float, delta: float, release: Release) -> float:
        """The eps, for this delta and release model, that needs the noise of a searched budget."""
        own, searched = self.study.privacy, math.log(epsilon)
        wanted = self._noise(epsilon, own.delta, own.release, 1)
        found = brentq(
            lambda at: math.log(self._noise(math.exp(at), delta, release, 1) / wanted), searched - 12, searched + 7
        )
        return math.exp(found)

    def _covers(self, noise: float, rounds: int) -> bool:
        """Whether this noise multiplier lies between those of the searched budgets, for this number of rounds."""
        searched = [log_noise(each) for each in self._searched_noise(rounds)]
        return min(searched) - MARGIN <= log_noise(noise) <= max(searched) + MARGIN

    def _expected(self, points: NDArray[np.float64], budget: int, noise: float, rounds: int) -> Expected:
        """Expected scores of all configurations with these rounds. `budget`: index of a searched budget, else -1."""
        if budget >= 0:
            return self.surface.expected(points, log_noise(noise), budget)
        if rounds not in self._between:
            searched = {number: log_noise(each) for number, each in enumerate(self._searched_noise(rounds))}
            self._between[rounds] = self.surface.between(points, searched)
        return self._between[rounds].at(log_noise(noise))

    @cached_property
    def _between(self) -> dict[int, Between]:
        """By number of rounds."""
        return {}

    @cached_property
    def _curves(self) -> dict[tuple[float | None, Release | None, int | None], list[Point]]:
        """Found so far, by the arguments of `curve`."""
        return {}

    @cached_property
    def _rounds(self) -> NDArray[np.int64]:
        """The rounds of every configuration of the lattice."""
        return self.lattice.rounds(self.study.stage_rounds(self.method).confirm)

    def _check_rounds(self, rounds: int | None) -> None:
        known = set(self._rounds.tolist())
        if rounds is not None and rounds not in known:
            raise UserError(f"rounds = {rounds}: {self.method.shown} was searched with {_listed(known)} rounds")

    def curve(
        self, delta: float | None = None, release: Release | None = None, rounds: int | None = None
    ) -> list[Point]:
        """From the smallest to the largest finite budget, without those for which the surface cannot predict."""
        self._check_rounds(rounds)
        if (known := self._curves.get((delta, release, rounds))) is not None:
            return known
        finite = self.budgets(delta, release)
        between = np.geomspace(min(finite), max(finite), CURVE).tolist() if len(finite) > 1 else []
        points = []
        for epsilon in sorted({*finite, *(float(f"{epsilon:.3g}") for epsilon in between)}):
            try:
                points.append(self.at(epsilon, delta, release, rounds))
            except UserError:
                continue
        self._curves[delta, release, rounds] = points
        return points

    def reach(
        self, target: float, delta: float | None = None, release: Release | None = None, rounds: int | None = None
    ) -> Point | None:
        """The smallest eps whose expected score reaches a target; None if none does between the searched budgets."""
        cost, curve = self.study.objective_spec.cost, self.curve(delta, release, rounds)

        def reaches(point: Point) -> bool:
            return cost(point.score) <= cost(target)

        first = next((number for number, point in enumerate(curve) if reaches(point)), None)
        if first is None or first == 0:
            return None if first is None else curve[0]
        low, high = curve[first - 1].epsilon, curve[first]
        while high.epsilon / low > 1.005:
            try:
                middle = self.at(math.sqrt(low * high.epsilon), delta, release, rounds)
            except UserError:  # in a gap between the searched budgets
                return high
            if reaches(middle):
                high = middle
            else:
                low = middle.epsilon
        return high

    def reach_of_band(
        self, target: float, delta: float | None = None, release: Release | None = None, rounds: int | None = None
    ) -> tuple[float | None, float | None]:
        """The smallest eps of the curve whose band reaches the target at its better end, and the smallest from which on
        it does at its worse end; None if there is none."""
        cost, curve = self.study.objective_spec.cost, self.curve(delta, release, rounds)
        perhaps = (p.epsilon for p in curve if cost(p.score) - 2 * p.deviation <= cost(target))
        last_unsure = max((p.epsilon for p in curve if cost(p.score) + 2 * p.deviation > cost(target)), default=0.0)
        return next(perhaps, None), next((p.epsilon for p in curve if p.epsilon > last_unsure), None)

    @cached_property
    def finalists(self) -> list[Finalist]:
        """All configurations of the contests, with the predicted and the measured score."""
        space, objective = self.method.space(), self.study.objective_spec
        groups: dict[tuple[int, str], list[Result]] = defaultdict(list)
        for result in self.results:
            if result.stage == "contest" and result.score is not None:
                groups[result.budget, repr(sorted(configuration_of(result.row.content, space).items()))].append(result)
        found, sign = [], -1.0 if objective.lower_is_better else 1.0
        for (number, _), results in groups.items():
            configuration, scores = (
                configuration_of(results[0].row.content, space),
                [r.score for r in results if r.score is not None],
            )
            point, noise = self.lattice.coordinates([configuration]), log_noise(self._noise_of(results[0].row))
            predicted, deviation = self.of_search.scores(point, noise, number)
            error = float(np.std(scores, ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
            epsilon, expected = self.epsilons[number], sign * float(predicted[0])
            found.append(Finalist(epsilon, configuration, expected, float(deviation[0]), fmean(scores), error))
        return found


def study_surfaces(ledger: Ledger, study: Study) -> list[StudySurface]:
    """One for every setting and method that the strategy `surface` has searched."""
    families: dict[CellId, list[SearchRecord]] = defaultdict(list)
    for record in search_records(ledger, study):
        if record.variant.strategy.name == "surface" and record.history.best("surface") is not None:
            families[record.cell_id._replace(epsilon=0)].append(record)
    found = []
    for records in families.values():
        results: list[Result] = []
        for number, record in enumerate(records):
            for stage in ("surface", "contest"):
                for key, row in ledger.rows(record.stages.get(stage, []), whole=False).items():
                    state, score, _ = record.history.outcomes.get(key, ("failed", None, None))
                    if state != "failed":
                        results.append(Result(number, stage, row, score if state == "done" else None))
        first = records[0]
        epsilons = tuple(record.epsilon for record in records)
        rows = first.history.task.validation_rows
        found.append(StudySurface(study, first.setting, first.method, epsilons, rows, tuple(results)))
    return found


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))
