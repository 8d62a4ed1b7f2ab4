"""Whether the released programs are as private as they claim."""

import math

from orchestrator.reproduction.findings.evidence import Evidence
from orchestrator.reproduction.findings.finding import FAILS, HOLDS, Finding
from orchestrator.reproduction.paper_tables import FEDNEW

CLAIM = "All baselines are calibrated to the same (ε, δ)"


def privacy_claims(evidence: Evidence) -> Finding | None:
    released = [ours for ours in evidence.results.select(as_released=True) if not math.isnan(ours.actual_epsilon)]
    if not released:
        return None
    weaker = [ours for ours in released if ours.actual_epsilon > ours.epsilon * 1.01]
    stronger = [ours for ours in released if ours.actual_epsilon < ours.epsilon * 0.99]
    sentences = []
    for paper, is_fednew in (("main", False), (FEDNEW, True)):
        if entries := [ours for ours in released if ours.method.startswith(FEDNEW) == is_fednew]:
            less, more = (sum(ours in group for ours in entries) for group in (weaker, stronger))
            sentences.append(
                f"Of {len(entries)} released entries of the {paper} paper, {less} are less private than they claim; "
                f"{more} are more private and lose accuracy."
            )
    for method, study, clients in dict.fromkeys((ours.method, ours.study, ours.clients) for ours in released):
        pairs = [
            f"{ours.epsilon:g} → {'∞' if math.isinf(ours.actual_epsilon) else f'{ours.actual_epsilon:.3g}'}"
            for ours in released
            if (ours.method, ours.study) == (method, study)
        ]
        sentences.append(
            f"{method} ({study}, {clients} clients), claimed → actual ε: {', '.join(dict.fromkeys(pairs))}."
        )
    return Finding(CLAIM, FAILS if weaker or stronger else HOLDS, tuple(sentences))
