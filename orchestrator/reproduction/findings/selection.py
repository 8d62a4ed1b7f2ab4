"""How the choice of winners affects results: by one seed or several, on validation or on test rows."""

import math
from collections.abc import Sequence
from statistics import fmean

from orchestrator.reproduction.findings.evidence import JOINT, Evidence
from orchestrator.reproduction.findings.finding import FAILS, HOLDS, IN_PART, Finding
from orchestrator.reproduction.our_results import OurResult

GRID = "grid of "
"""Prefix of labels in the study that confirms every configuration of a grid, to choose among them on test rows."""


def one_seed(evidence: Evidence) -> Finding | None:
    """The same methods with the papers' search and with ours."""
    pairs = []
    for papers in evidence.results.select(plain=True, paper_search=True, finished=True):
        key = {"setting": papers.setting, "clients": papers.clients, "epsilon": papers.epsilon, "label": papers.label}
        same = evidence.results.select(**key, paper_search=False, plain=True, finished=True)
        pairs += [(papers, ours) for ours in same]
    if not pairs:
        return None
    gains = _gains(pairs)
    moved = sum(abs(gain) > 1 for gain in gains)
    papers, ours = max(pairs, key=lambda pair: abs(pair[1].mean() - pair[0].mean()))
    settings = dict.fromkeys(papers.setting for papers, _ in pairs)
    sentences = [
        f"Our search (several seeds, a contest, grids that refine) changes the final accuracy of {len(pairs)} cells by "
        f"{fmean(gains):+.2f} points on average; {moved} of them change by more than a point.",
        f"The largest change is {papers.label} at ε = {papers.epsilon:g}: {papers.mean():.2f} with the papers' search, "
        f"{ours.mean():.2f} with ours ({papers.setting}).",
    ]
    for setting in settings if len(settings) > 1 else ():
        here = _gains([pair for pair in pairs if pair[0].setting == setting])
        sentences.append(
            f"{setting}: {fmean(here):+.2f} points on average over {len(here)} cells; {sum(abs(g) > 1 for g in here)} "
            "change by more than a point."
        )
    return Finding(
        "One fixed seed is enough to choose a winner",
        HOLDS if not moved else IN_PART if moved < len(pairs) / 4 else FAILS,
        (
            *sentences,
            "Seeds and grids changed together, so the seeds are not the only cause; `selection.md` of a study with our "
            "search lists what its first seed alone would have chosen.",
            "Neither search uses the test rows.",
        ),
    )


def _gains(pairs: Sequence[tuple[OurResult, OurResult]]) -> list[float]:
    return [ours.mean() - papers.mean() for papers, ours in pairs]


def tuned_on_test_rows(evidence: Evidence) -> Finding | None:
    """Compare choosing on test rows with choosing on validation rows, in a study that confirmed every configuration."""
    grids: dict[tuple[str, str, float], list[OurResult]] = {}
    for ours in evidence.results.select(finished=True):
        if ours.method.startswith(GRID) and not math.isnan(ours.validation_score):
            grids.setdefault((ours.setting, ours.method.removeprefix(GRID), ours.epsilon), []).append(ours)
    if not grids:
        return None
    gains, optimism, sentences = [], [], []
    for (_, method, epsilon), grid in grids.items():
        by_test = max(grid, key=lambda ours: ours.first_seed_score)
        by_validation = max(grid, key=lambda ours: ours.validation_score)
        gains.append(by_test.mean() - by_validation.mean())
        optimism.append(by_test.first_seed_score - by_test.mean())
        sentences.append(
            f"{method} at ε = {epsilon:g}, {len(grid)} configurations: the test rows choose {by_test.label_suffix}, "
            f"which reaches {by_test.mean():.2f}; the validation rows choose {by_validation.label_suffix}, which "
            f"reaches {by_validation.mean():.2f}."
        )
    summary = (
        f"Over {len(gains)} cells, choosing on the test rows with one seed, as the released programs did, adds "
        f"{fmean(gains):+.2f} points to the mean over seeds ({min(gains):+.2f} to {max(gains):+.2f}). On the seed that "
        f"chose it, the winner looks {fmean(optimism):+.2f} points better than on average. Validation used shorter "
        "runs on fewer rows, which is part of the effect."
    )
    verdict = HOLDS if max(gains) <= JOINT else IN_PART if fmean(gains) <= JOINT else FAILS
    return Finding("Tuning on the test rows does no harm", verdict, (summary, *sentences))
