"""Which candidate wins: one rule for a search, one for a contest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.search.candidates import (
    Candidate,
    Outcomes,
    mean,
    paired_difference,
    spread,
    within_standard_error,
)
from orchestrator.search.objective import ACCURACY, Objective


@dataclass(frozen=True)
class Choice:
    """The winner of a search or of its contest."""

    candidate: Candidate
    score: float
    """Mean over its finished trials in the deciding stage; in a private search, the noisy score of the winning run."""
    spread: float
    """Standard deviation over the same trials; 0 in a private search."""
    failed: int
    """Seeds on which the winner's trial did not finish."""
    within_standard_error: int | None
    """Number of candidates, including the winner, within one standard error of the best; None if the score has no
    standard error."""

    @property
    def key(self) -> str:
        return self.candidate.key


def ranked(candidates: Sequence[Candidate], outcomes: Outcomes, objective: Objective = ACCURACY) -> list[Candidate]:
    """The candidates, best first, ties in the given order. Candidates without a finished trial are left out."""
    ranks = [(candidate.rank(outcomes, objective), candidate) for candidate in candidates]
    finished = [(rank, candidate) for rank, candidate in ranks if rank.failed < len(candidate.keys)]
    return [candidate for _, candidate in sorted(finished, key=lambda pair: pair[0])]


def choose(
    candidates: Sequence[Candidate], outcomes: Outcomes, rows: int, objective: Objective = ACCURACY
) -> Choice | None:
    """The candidate with the fewest failed seeds; ties by the mean score, then by the mean loss, then in the given
    order. None if no trial finished. `rows`: the number of validation rows, from which the standard error of a score
    is computed if there is a single seed."""
    best = next(iter(ranked(candidates, outcomes, objective)), None)
    if best is None:
        return None
    return _choice(best, outcomes, _count_near(best, candidates, outcomes, rows, objective))


def win_contest(
    candidates: Sequence[Candidate],
    outcomes: Outcomes,
    objective: Objective = ACCURACY,
    *,
    rows: int | None = None,
    prefer_small_spread: bool = True,
) -> Choice | None:
    """The winner of a contest; None if no trial finished. Without `prefer_small_spread`, it is the best candidate, the
    one that `choose` returns. Otherwise it is the candidate with the smallest spread among those within one paired
    standard error of the best, ties in the given order. Candidates with more failed seeds than the best cannot win.
    `rows`: as for `choose`, where it is known."""
    best = next(iter(ranked(candidates, outcomes, objective)), None)
    if best is None:
        return None
    near = _count_near(best, candidates, outcomes, rows, objective)
    if prefer_small_spread:
        tied = _tied(best, candidates, outcomes)
        best = min(tied, key=lambda candidate: spread(candidate.finished_scores(outcomes)))
    return _choice(best, outcomes, near)


def clearly_differ(
    ours: Candidate, theirs: Candidate, outcomes: Outcomes, rows: int, objective: Objective = ACCURACY
) -> bool:
    """Whether two candidates differ by more than two standard errors. With several seeds, the standard error is that
    of the paired difference. With one seed, it is that of an accuracy on `rows` rows, or 0 for other metrics. A failed
    seed of `theirs` counts as a difference."""
    difference = paired_difference(ours.scores(outcomes), theirs.scores(outcomes))
    if difference is None or None in theirs.scores(outcomes):
        return True
    mean_difference, error = difference
    if len(ours.keys) == 1:
        error = objective.standard_error(ours.finished_scores(outcomes)[0], rows) or 0.0
    return abs(mean_difference) > 2 * error


def _choice(winner: Candidate, outcomes: Outcomes, near: int | None) -> Choice:
    scores = winner.finished_scores(outcomes)
    return Choice(winner, mean(scores), spread(scores), len(winner.keys) - len(scores), near)


def _count_near(
    best: Candidate, candidates: Sequence[Candidate], outcomes: Outcomes, rows: int | None, objective: Objective
) -> int | None:
    """How many candidates are within one standard error of the best. With several seeds, the standard error is that of
    the paired difference; with one seed, that of a score on `rows` rows, if it has one."""
    if len(best.keys) > 1:
        return len(_tied(best, candidates, outcomes))
    (score,) = best.finished_scores(outcomes)
    error = None if rows is None else objective.standard_error(score, rows)
    if error is None:
        return None
    return sum(1 for other in candidates if (done := other.finished_scores(outcomes)) and mean(done) >= score - error)


def _tied(best: Candidate, candidates: Sequence[Candidate], outcomes: Outcomes) -> list[Candidate]:
    """Candidates within one paired standard error of the best that have no more failed seeds, in the given order."""
    ours = best.scores(outcomes)
    tied = []
    for candidate in candidates:
        theirs = candidate.scores(outcomes)
        if theirs.count(None) > ours.count(None):
            continue
        if candidate is best or within_standard_error(ours, theirs):
            tied.append(candidate)
    return tied
