"""The search of one cell by one variant: which trials come next, given the outcomes so far.

A search has the strategy's stages, then a contest of the best candidates on fresh seeds, then the confirm stage. A
stage opens when every trial of the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.search.candidates import Outcomes
from orchestrator.search.expected_trials import trials_to_come
from orchestrator.search.history import History
from orchestrator.search.plugin_checks import check_configuration, check_proposal, place
from orchestrator.search.running_best import RunningBest
from orchestrator.search.selection import Choice
from orchestrator.search.strategies.base import Proposal
from orchestrator.search.strategies.private import noise_key
from orchestrator.search.variant import SearchVariant
from orchestrator.search.winner import best_configurations, finalists, winner
from orchestrator.study.cells import Cell
from search_spaces import Configuration
from trainables.errors import UserError
from trainables.federation.trial_spec import TrialSpec


class CellSearch:
    def __init__(
        self,
        cell: Cell,
        variant: SearchVariant,
        outcomes: Outcomes,
        validation_rows: int,
        secret: bytes = b"",
        noise: Callable[[int], float] | None = None,
    ) -> None:
        """`outcomes`: of all trials of the sweep; grows while the sweep runs. `secret`: of a private search. `noise`:
        see `SearchTask.noise`; None if the strategy will not be asked for proposals."""
        self.cell, self.variant = cell, variant
        task = cell.study.search_task(cell.method, cell.epsilon, variant, validation_rows, secret)
        self.task = replace(task, noise_by_rounds=noise)
        self.configurations: dict[str, Configuration] = {}
        """The configuration of every candidate, by the key of its first trial."""
        self.trial_seeds: dict[str, int] = {}
        """The seed of every trial by its key, if the strategy is private or chooses seeds."""
        self.history = History(
            self.task,
            variant.seeds,
            outcomes,
            configurations=self.configurations,
            trial_seeds=self.trial_seeds,
        )
        restarting = [stage for stage in variant.stages if variant.restarts(stage)]
        self.best = RunningBest(cell.study.objective_spec, restarting)
        self.neighbours: list[CellSearch] = []
        """The searches of the next smaller and next larger budget, whose winners join the contest (warm start)."""
        self.together: list[CellSearch] = [self]
        """The searches that propose at the same time: this one, or those of all budgets of its method and setting."""
        self.search_over = False
        """Whether the strategy has no further stage; contest and confirm may follow."""
        self._repeats = 0
        """Proposals in a row without a new configuration."""

    @property
    def name(self) -> str:
        """For display."""
        cell = self.cell
        return cell.study.cell_name(cell.setting.name, cell.method, cell.epsilon, self.variant)

    @property
    def stages(self) -> dict[str, list[str]]:
        """Keys of the trials of every open stage."""
        return self.history.stages

    def seed_count(self, stage: str) -> int:
        return len(self.variant.seeds(stage))

    def open(self, stage: str, trials: Sequence[TrialSpec]) -> None:
        """Open a stage with these trials, or add them to a stage that is open."""
        opened, seeds = self.stages.setdefault(stage, []), self.seed_count(stage)
        firsts = trials[-len(opened) % seeds :: seeds]  # the first trial of every new candidate
        for trial in firsts:
            clip, rounds = trial.privacy.clip, trial.rounds
            configuration = self.cell.space.configuration(trial.hyperparameters, clip=clip, rounds=rounds)
            self.configurations[trial.key] = configuration
        opened.extend(trial.key for trial in trials)
        if self.variant.strategy.publishes_only_winner or self.variant.strategy.chooses_seeds:
            self.trial_seeds.update((trial.key, trial.seed) for trial in trials)

    def next_stage(self) -> tuple[str, list[TrialSpec]]:
        """The stage to open now that all trials so far have ended, and its trials. "confirm" without trials: the search
        has ended. "contest" without trials: searches of neighbouring budgets, whose winners may join it, still run."""
        if "confirm" in self.stages:
            return "confirm", []
        if "contest" not in self.stages:
            proposal = self.variant.strategy.propose(self.task, self.history)
            check_proposal(self.variant.strategy, proposal, self.stages)
            self.search_over = proposal is None
            if proposal is not None:
                return proposal.stage, self._proposed_trials(proposal)
            if self.variant.has_contest:
                if not all(neighbour.search_over for neighbour in self.neighbours):
                    return "contest", []
                finalists = self.finalists()
                return ("contest", self.trials("contest", finalists)) if finalists else ("confirm", [])
        choice = self.winner()
        if choice is None:
            return "confirm", []
        configuration = self.history.configuration(choice.candidate)
        if self.variant.strategy.publishes_only_winner:
            seed, key = self.trial_seeds[choice.key], noise_key(self.task.secret)
            return "confirm", [self.cell.private_trial(configuration, seed, "test", key)]
        return "confirm", self.trials("confirm", [configuration])

    def finalists(self) -> list[Configuration]:
        """The configurations that enter the contest."""
        guests = [c for other in self.neighbours for c in best_configurations(other.variant, other.history, 1)]
        return finalists(self.variant, self.history, self.cell.study.search.finalists, guests)

    def winner(self) -> Choice | None:
        return winner(self.variant, self.history)

    def _proposed_trials(self, proposal: Proposal) -> list[TrialSpec]:
        stage, strategy, trials = proposal.stage, self.variant.strategy, []
        for number, configuration in enumerate(proposal.configurations):
            try:
                check_configuration(configuration, self.cell.space)
                if proposal.seeds is None:
                    trials += self.trials(stage, [configuration])
                elif strategy.chooses_seeds:
                    trials += self.trials(stage, [configuration], [self._search_seed(proposal.seeds[number])])
                else:
                    seed, key = proposal.seeds[number], noise_key(self.task.secret)
                    trials.append(self.cell.private_trial(configuration, seed, "validation", key))
            except UserError as error:
                where = place(type(strategy), "propose")
                raise UserError(f"{where}: strategy {strategy.name} proposed {configuration}: {error}") from None
        firsts = trials[:: self.seed_count(stage)]
        is_new = stage not in self.stages or any(trial.key not in self.configurations for trial in firsts)
        self._repeats = 0 if is_new else self._repeats + 1
        if self._repeats > self.task.budget:  # a search that repeats itself more often would not end
            raise UserError(
                f"strategy {strategy.name} proposed only configurations that have run, {self._repeats} times in a row"
            )
        return trials

    def _search_seed(self, seed: int) -> int:
        if seed not in self.task.seeds:
            raise UserError(f"seed {seed!r} is not one of seeds.search = {list(self.task.seeds)}")
        return seed

    def trials(
        self, stage: str, configurations: Sequence[Configuration], seeds: Sequence[int] | None = None
    ) -> list[TrialSpec]:
        """Every configuration with every seed of the stage (or of `seeds`), ordered by configuration, then by seed."""
        seeds, trials = seeds or self.variant.seeds(stage), []
        for configuration in configurations:
            rounds = int(configuration.get("rounds", self.variant.planned_rounds(stage, self.task.rounds)))
            last = self.variant.last_round(stage, rounds)
            stop_after = last if last < rounds else None
            new = self.cell.trials(configuration, seeds, rounds, stop_after, confirm=stage == "confirm")
            TrialSpec.set_keys(new)
            trials += new
        return trials

    def last_round(self, stage: str) -> int:
        """Last round that trials of a stage run, unless their configuration sets the rounds."""
        return self.variant.last_round(stage, self.variant.planned_rounds(stage, self.task.rounds))

    def trials_to_come(self) -> dict[str, int]:
        """Expected number of trials that later stages will add, by stage."""
        if "confirm" in self.stages:
            return {}
        opened = {stage: len(keys) for stage, keys in self.stages.items()}
        study = self.cell.study
        return trials_to_come(self.variant, self.task, study.search.finalists, opened, study.variants)
