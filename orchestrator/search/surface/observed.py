"""Fits the surface to the trials of a study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.search.history import History
from orchestrator.search.surface.lattice import Lattice
from orchestrator.search.surface.model import Surface, Trial, log_noise, trial_noise
from search_spaces import Configuration


def fitted(budgets: Sequence[History], lattice: Lattice, stages: Sequence[str] = ("surface",)) -> Surface:
    """The surface fitted to the trials of these stages. `budgets`: the histories of all budgets of a method."""
    trials = [trial for number, history in enumerate(budgets) for trial in _trials(number, history, lattice, stages)]
    task = budgets[0].task
    percent = bool(task.objective.unit)
    deviation = trial_noise(task.validation_rows, percent)
    return Surface(trials, lattice.is_numeric, unit=1.0 if percent else None, deviation=deviation)


def noise_of(history: History, configuration: Configuration, stage: str = "surface") -> float:
    """`log_noise` of a trial of this cell with the configuration."""
    rounds = history.task.rounds
    planned = rounds.confirm if stage == "contest" else rounds.fine
    return log_noise(history.task.noise(int(configuration.get("rounds", planned))))


def _trials(number: int, history: History, lattice: Lattice, stages: Sequence[str]) -> Iterator[Trial]:
    """The trials of budget `number` that finished or diverged."""
    for stage in stages:
        candidates = history.candidates(stage, unique=False)
        configurations = [history.configuration(candidate) for candidate in candidates]
        points = lattice.coordinates(configurations).tolist()
        for candidate, configuration, point in zip(candidates, configurations, points, strict=True):
            noise = noise_of(history, configuration, stage)
            for key, seed in zip(candidate.keys, history.seeds_of_stage(stage), strict=True):
                state, score, _ = history.outcomes[key]
                value = None if state != "done" or score is None else -history.task.objective.cost(score)
                if state != "failed":
                    yield Trial(point, noise, history.trial_seeds.get(key, seed), number, value)
