"""Which configuration wins: one rule for a search, one for a contest; used by the search and by the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.search.contenders import Contender, Outcome, mean, paired, spread
from orchestrator.study.objective import ACCURACY, Objective


@dataclass(frozen=True)
class Choice:
    """The winner among the contenders of a search, or of its contest."""

    contender: Contender
    score: float
    """The mean over its seeds, where it was chosen."""
    spread: float
    """Over the same seeds."""
    lost: int
    """Seeds on which even the winner did not run to its end."""
    within_standard_error: int | None
    """Contenders, the winner among them, that cannot be told from the best mean; None where the score has no standard
    error."""

    @property
    def key(self) -> str:
        return self.contender.key


def ranked(
    contenders: Sequence[Contender], outcomes: Mapping[str, Outcome], objective: Objective = ACCURACY
) -> list[Contender]:
    """Those of which some trial ran to its end, the best first; equals in the order given."""
    standings = [(contender.standing(outcomes, objective), contender) for contender in contenders]
    alive = [(standing, contender) for standing, contender in standings if standing.lost < len(contender.keys)]
    return [contender for _, contender in sorted(alive, key=lambda found: found[0])]


def choose(
    contenders: Sequence[Contender], outcomes: Mapping[str, Outcome], rows: int, objective: Objective = ACCURACY
) -> Choice | None:
    """The best mean over seeds; ties by mean loss, then by grid order. None if nothing ran to its end. What cannot be
    told from it: by its seeds, or for a single seed by the number of rows it was judged on."""
    best = next(iter(ranked(contenders, outcomes, objective)), None)
    if best is None:
        return None
    score = mean(_done(best, outcomes))
    if len(best.keys) > 1:
        near: int | None = len(_tied(best, contenders, outcomes, objective))
    elif (error := objective.standard_error(score, rows)) is not None:
        near = sum(1 for other in contenders if (found := _done(other, outcomes)) and mean(found) >= score - error)
    else:
        near = None
    return _choice(best, outcomes, near)


def win_contest(
    contenders: Sequence[Contender], outcomes: Mapping[str, Outcome], objective: Objective = ACCURACY
) -> Choice | None:
    """The best mean; among those within one paired standard error of it the smallest spread, then the earliest. One
    that was lost on a seed is no match for those that were not."""
    best = next(iter(ranked(contenders, outcomes, objective)), None)
    if best is None:
        return None
    tied = _tied(best, contenders, outcomes, objective)
    winner = min(tied, key=lambda contender: spread(_done(contender, outcomes)))  # min keeps the first of equals
    return _choice(winner, outcomes, len(tied))


def leader(
    met: Sequence[Contender],
    searched: Sequence[Contender],
    outcomes: Mapping[str, Outcome],
    objective: Objective = ACCURACY,
) -> Choice | None:
    """Who wins as it stands, among those that have ended: of the contest once it has results, else of the search."""
    ended = [contender for contender in met if contender.ended(outcomes)]
    if ended:
        return win_contest(ended, outcomes, objective)
    best = next(iter(ranked([c for c in searched if c.ended(outcomes)], outcomes, objective)), None)
    return None if best is None else _choice(best, outcomes, None)  # who else might have won is not asked


def told_apart(
    ours: Contender, theirs: Contender, outcomes: Mapping[str, Outcome], rows: int, objective: Objective = ACCURACY
) -> bool:
    """Whether two contenders differ by more than twice the noise: the standard error of their difference over seeds,
    or for a single seed of a share of so many rows. One that was lost on a seed differs from one that was not."""
    difference = paired(ours.scores(outcomes), theirs.scores(outcomes))
    if difference is None or None in theirs.scores(outcomes):
        return True
    mean_of, error = difference
    if len(ours.keys) == 1:
        error = objective.standard_error(_done(ours, outcomes)[0], rows) or 0.0
    return abs(mean_of) > 2 * error


def _choice(winner: Contender, outcomes: Mapping[str, Outcome], near: int | None) -> Choice:
    found = _done(winner, outcomes)
    return Choice(winner, mean(found), spread(found), len(winner.keys) - len(found), near)


def _tied(
    best: Contender, contenders: Sequence[Contender], outcomes: Mapping[str, Outcome], objective: Objective
) -> list[Contender]:
    """Within one paired standard error of the best, lost on no more seeds than it; in the order given."""
    ours, lost = best.scores(outcomes), best.standing(outcomes, objective).lost
    found = []
    for contender in contenders:
        difference = paired(ours, contender.scores(outcomes))
        if contender.standing(outcomes, objective).lost > lost or difference is None:
            continue
        if contender is best or abs(difference[0]) <= difference[1]:
            found.append(contender)
    return found


def _done(contender: Contender, outcomes: Mapping[str, Outcome]) -> list[float]:
    return [score for score in contender.scores(outcomes) if score is not None]
