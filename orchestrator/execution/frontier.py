"""What `fedsweep frontier` computes: predictions from the results of a folder, and training runs that check them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from orchestrator.execution.packing import AUTO_LANES, Capacity, make_packs
from orchestrator.report.frontier import draw
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.results.searches import study_of
from orchestrator.results.surfaces import Point, StudySurface, study_surfaces
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.choices import Release
from trainables.errors import UserError
from trainables.federation.federation_size import FederationSize
from trainables.federation.problem import ProblemData
from trainables.federation.server import run_pack

FIRST_SEED = 2_000_000
"""First seed of the runs that check predictions. No study is expected to use seeds this large."""


class Confirmed(NamedTuple):
    mean: float
    error: float
    """Standard error of the mean."""
    seeds: int


def read_surfaces(results: Path | str) -> tuple[Study, list[StudySurface]]:
    with results_location(results).open_for_reading() as folder, Ledger.read(folder) as ledger:
        study = study_of(ledger, f"results folder {results}")
        surfaces = study_surfaces(ledger, study)
    if not surfaces:
        raise UserError(f"results folder {results} has no finished trial of the strategy surface")
    return study, surfaces


def confirmed(
    surface: StudySurface, point: Point, seeds: int, delta: float | None, release: Release | None, device: str = "cpu"
) -> Confirmed:
    """Train a predicted configuration on new seeds, in this process, and evaluate it on the validation rows."""
    study = surface.study
    privacy = study.privacy.model_dump() | {"delta": delta or study.privacy.delta}
    content = study.model_dump() | {
        "epsilons": [point.epsilon],
        "methods": [surface.method.model_dump()],
        "compare_to": "",
        "privacy": privacy | {"release": release or study.privacy.release},
        "seeds": study.seeds.model_dump() | {"contest": [FIRST_SEED + number for number in range(seeds)]},
    }
    prepared = PreparedStudy.prepare(Study.model_validate(content))
    (cell,) = [cell for cell in prepared.cells if cell.setting.name == surface.setting]
    rounds = study.stage_rounds(surface.method).confirm
    trials = cell.trials(point.configuration, cell.study.seeds.contest, rounds)
    scores = []
    size = FederationSize(1, 1.0, float(device == "cuda"))
    for pack in make_packs(trials, Capacity(size, 1, AUTO_LANES[device])):
        lanes = run_pack(pack, ProblemData.of(prepared.problems[pack[0].problem.key]), device=device)
        for trial in pack:
            values = lanes[trial.key].metrics.get(study.objective, {})
            if lanes[trial.key].state == "done" and trial.last_round in values:
                scores.append(values[trial.last_round])
    if not scores:
        raise UserError(f"no seed of epsilon = {point.epsilon:g} finished")
    error = stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
    return Confirmed(fmean(scores), error, len(scores))


def draw_frontier(
    results: Path | str,
    surfaces: Sequence[StudySurface],
    delta: float | None,
    release: Release | None,
    rounds: int | None,
) -> str:
    location = results_location(results)
    with location.open_for_writing():
        return location.address_of(draw(location.folder, surfaces, delta, release, rounds))
