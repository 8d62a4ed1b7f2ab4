"""One cell searched in one way: which trials come next, given what has ended.

Every way has search stages (a grid's are coarse and fine, Optuna's is asked batch after batch, halving has rungs), then
a contest of the best where the way has one, then confirm. A stage opens when the one before it has ended. Within a
search a configuration runs with several seeds, and only configurations are compared, never single trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import search_spaces
from orchestrator.search.contenders import Contender, Outcome, contenders_of
from orchestrator.search.extent import has_contest
from orchestrator.search.lead import Lead
from orchestrator.search.optuna_search import OptunaSearch, draw, rung_sizes, search_budget
from orchestrator.search.private_search import best_of, draws, score_deviation
from orchestrator.search.selection import Choice, choose, ranked, told_apart, win_contest
from orchestrator.study.cells import Cell
from orchestrator.study.strategies import SEARCH_STAGES, SearchVariant
from search_spaces import Configuration
from trainables.federation.trial_spec import TrialSpec

Next = tuple[str, list[TrialSpec]]
OVER: Next = ("confirm", [])
HELD: Next = ("contest", [])
"""Until the cells beside it have searched."""


class CellSearch:
    """One cell searched in one way."""

    def __init__(self, cell: Cell, strategy: SearchVariant, rows: int, secret: bytes = b"") -> None:
        """`secret`: what a private search follows from."""
        self.cell, self.strategy = cell, strategy
        self._secret = secret
        self._seeds: dict[str, int] = {}
        """Of the runs of a private search, by trial, in the order opened."""
        self.stages: dict[str, list[str]] = {}
        """The trials of every stage that has been opened, in grid order."""
        self._configurations: dict[str, Configuration] = {}
        """By the first trial of a contender."""
        self._rows = rows
        self.lead = Lead(cell.study.judged_by)
        self._asked: OptunaSearch | None = None
        self.neighbours: list[CellSearch] = []
        """The same on the budgets above and below, where their best are to meet in its contest."""
        self.searched = False
        """Whether its search stages are over."""

    @property
    def name(self) -> str:
        first = self.cell.study.strategies[0]
        return self.cell.id if self.strategy == first else f"{self.cell.id} ({self.strategy.name})"

    def open(self, stage: str, trials: Sequence[TrialSpec]) -> None:
        """Take note that a stage has these trials, or these more."""
        opened, seeds = self.stages.setdefault(stage, []), self.seeds_of(stage)
        firsts = trials[-len(opened) % seeds :: seeds]  # each stands for its contender
        self._configurations.update((trial.key, self.cell.configuration(trial)) for trial in firsts)
        opened.extend(trial.key for trial in trials)
        if self.strategy.search == "private":
            self._seeds.update((trial.key, trial.seed) for trial in trials)

    def next_trials(self, outcomes: Mapping[str, Outcome]) -> Next:
        """The stage to open now that all trials so far have ended, and its trials; no trials: the cell is finished."""
        if "confirm" in self.stages:
            return OVER
        if self.strategy.search == "private":
            return self._next_private(outcomes)
        if "contest" not in self.stages:
            search = self._next_search(outcomes)
            self.searched = search is None or search is OVER
            if search is not None:
                return search
            if has_contest(self.cell.study, self.strategy):
                if not all(beside.searched for beside in self.neighbours):
                    return HELD
                best = self.finalists(outcomes)
                return ("contest", self._trials("contest", best)) if best else OVER
        choice = self.choice(outcomes)
        return OVER if choice is None else ("confirm", self._trials("confirm", [self.configuration(choice.contender)]))

    def _next_search(self, outcomes: Mapping[str, Outcome]) -> Next | None:
        match self.strategy.search:
            case "grid":
                return self._next_of_grid(outcomes)
            case "optuna":
                return self._next_asked(outcomes)
            case "halving":
                return self._next_rung(outcomes)
        return self._next_drawn()

    def _next_of_grid(self, outcomes: Mapping[str, Outcome]) -> Next | None:
        space = self.cell.space
        if "coarse" not in self.stages:
            return "coarse", self._trials("coarse", space.grid(space.coarse))
        if "fine" not in self.stages:
            best = choose(self.contenders("coarse"), outcomes, self._rows, self.cell.study.judged_by)
            if best is None:
                return OVER
            grid = search_spaces.refine(space, self.cell.study.search.refine, self.configuration(best.contender))
            return "fine", self._trials("fine", grid)
        if self.cell.study.search.refine == "zoom":
            stage = next((stage for stage in ("finer", "finest") if stage not in self.stages), None)
            grid = self._closer(outcomes) if stage else []
            if stage and grid:
                return stage, self._trials(stage, grid)
        return None

    def _closer(self, outcomes: Mapping[str, Outcome]) -> list[Configuration]:
        """A further zoom, on the axes where the best so far sits on an edge of all that was tried, or where those
        beside it differ from it by more than the noise."""
        space, objective = self.cell.space, self.cell.study.judged_by
        contenders = self.contenders(*SEARCH_STAGES["grid"])
        best = choose(contenders, outcomes, self._rows, objective)
        if best is None:
            return []
        tried = {name: tuple(dict.fromkeys(self.configuration(c)[name] for c in contenders)) for name in space.coarse}
        winner = self.configuration(best.contender)
        unsure = [
            name
            for name, axis in tried.items()
            if search_spaces.is_numeric(axis)
            and (
                search_spaces.on_edge(axis, winner[name])
                or any(
                    told_apart(best.contender, other, outcomes, self._rows, objective)
                    for other in self._beside(best.contender, name, contenders)
                )
            )
        ]
        return search_spaces.refine_again(space, tried, winner, unsure) if unsure else []

    def _beside(self, winner: Contender, axis: str, contenders: Sequence[Contender]) -> list[Contender]:
        """The contenders next to one on an axis, below and above, that are like it on all others."""
        ours = self.configuration(winner)
        place = float(ours[axis])
        along: dict[float, Contender] = {}
        for contender in contenders:
            configuration = self.configuration(contender)
            if all(configuration[name] == ours[name] for name in self.cell.space.coarse if name != axis):
                along.setdefault(float(configuration[axis]), contender)
        below = max((value for value in along if value < place), default=None)
        above = min((value for value in along if value > place), default=None)
        return [along[value] for value in (below, above) if value is not None]

    def _next_asked(self, outcomes: Mapping[str, Outcome]) -> Next | None:
        if self._asked is None:
            self._asked = OptunaSearch(self.cell, self._trials)
        batch = self._asked.next_batch(outcomes)
        return ("optuna", batch) if batch else None

    def _next_drawn(self) -> Next | None:
        if "random" in self.stages:
            return None
        study, space = self.cell.study, self.cell.space
        return "random", self._trials("random", draw(space, search_budget(study, space), study.search.random.seed))

    def _next_rung(self, outcomes: Mapping[str, Outcome]) -> Next | None:
        """Those that go on begin again at round 0: rungs are packed anew, with whatever else waits, so that no lane is
        left empty; and a trial stays what its key says, whoever ran beside it."""
        study, space = self.cell.study, self.cell.space
        halving = study.search.halving
        climbed = [rung for rung in halving.stages if rung in self.stages]
        if len(climbed) == halving.rungs:
            return None
        rung = halving.stages[len(climbed)]
        if climbed:
            below = self.contenders(climbed[-1])
            best = ranked(below, outcomes, study.judged_by)[: halving.kept(len(below))]
            found = [self.configuration(contender) for contender in best]
        else:
            count = rung_sizes(study, self.cell.method, space)[rung]
            found = search_spaces.unique(draw(space, count, halving.seed))
        return (rung, self._trials(rung, found)) if found else OVER

    def _next_private(self, outcomes: Mapping[str, Outcome]) -> Next:
        """All runs at once; then the winner itself, judged on the test rows."""
        if "private" not in self.stages:
            drawn = draws(self.cell, self._secret)
            return "private", [self.cell.secret_trial(d.configuration, d.seed, "validation") for d in drawn]
        choice = self.choice(outcomes)
        if choice is None:
            return OVER
        configuration, seed = self.configuration(choice.contender), self._seeds[choice.key]
        return "confirm", [self.cell.secret_trial(configuration, seed, "test")]

    # ---- who wins

    def contenders(self, *stages: str) -> list[Contender]:
        """Each once, whichever stages it is in."""
        by_stage = (contenders_of(self.stages.get(s, []), self.seeds_of(s)) for s in stages)
        return list(dict.fromkeys(contender for found in by_stage for contender in found))

    def seeds_of(self, stage: str) -> int:
        """How many every contender of a stage has."""
        return len(self.cell.study.seeds_of(self.strategy, stage))

    def configuration(self, contender: Contender) -> Configuration:
        return self._configurations[contender.key]

    def finalists(self, outcomes: Mapping[str, Outcome]) -> list[Configuration]:
        """The best of all search stages: a fine grid may lie beside what the coarse one found. Those of the budgets
        above and below have the last places."""
        most = self.cell.study.search.contenders
        own = self._ranked(outcomes)[:most]
        winners = [configuration for beside in self.neighbours for configuration in beside._ranked(outcomes)[:1]]
        guests = [guest for guest in search_spaces.unique(winners) if guest not in own][: most - 1]
        return [*own[: most - len(guests)], *guests]

    def _ranked(self, outcomes: Mapping[str, Outcome]) -> list[Configuration]:
        found = ranked(self.contenders(*self.strategy.compared(self.stages)), outcomes, self.cell.study.judged_by)
        return search_spaces.unique(map(self.configuration, found))

    def choice(self, outcomes: Mapping[str, Outcome]) -> Choice | None:
        """The winner of the contest, or of the search where there is none."""
        study, objective = self.cell.study, self.cell.study.judged_by
        if self.strategy.search == "private":
            searched = {key: self._seeds[key] for key in self.stages.get("private", [])}
            return best_of(searched, outcomes, score_deviation(study, self.cell.epsilon, self._rows))
        if has_contest(self.cell.study, self.strategy):
            return win_contest(self.contenders("contest"), outcomes, objective)
        return choose(self.contenders(*self.strategy.compared(self.stages)), outcomes, self._rows, objective)

    # ---- trials

    def _trials(self, stage: str, configurations: Sequence[Configuration]) -> list[TrialSpec]:
        """Every configuration with every seed of the stage, seeds side by side."""
        seeds = self.cell.study.seeds_of(self.strategy, stage)
        return [trial for found in configurations for trial in self.cell.trials(stage, found, seeds)]
