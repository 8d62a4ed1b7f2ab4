"""DP-FedAdam and the other adaptive baselines."""

from collections.abc import Sequence

from orchestrator.reproduction.findings.evidence import EARLY, Evidence, Regime
from orchestrator.reproduction.findings.finding import Finding, by_search, listed, majority
from orchestrator.reproduction.paper_tables import FEDSOFIM

ADAM, *OTHERS = ADAPTIVE = ("DP-FedAdam", "DP-FedYogi", "DP-AdaFedProx")


def adaptive_baselines(evidence: Evidence) -> Finding | None:
    """Phenomenon 3 of section 5.3 of the DP-FedSOFIM paper."""
    regimes, our_search = (_with_all(group) for group in (evidence.regimes, evidence.our_search))
    if not regimes:
        return None
    strongest, late = _strongest(regimes), _late(regimes)
    gaps = [f"{r.mean(FEDSOFIM, EARLY):.2f} against {r.mean(ADAM, EARLY):.2f} in {r.name}" for r in late]
    sentences = [
        f"{ADAM} is the best of {', '.join(ADAPTIVE)} at the end in {strongest} of {len(regimes)} regimes.",
        f"At round {EARLY} DP-FedSOFIM leads {ADAM} by more than a point in {len(late)} of {len(regimes)}"
        + (f": {listed(gaps)}." if gaps else "."),
    ]
    our_counts = _strongest(our_search), len(_late(our_search))
    if our_search:
        sentences.append(f"With our search the counts are {our_counts[0]} and {our_counts[1]} of {len(our_search)}.")
    return Finding(
        f"Phenomenon 3: {ADAM} is the strongest adaptive baseline and starts late",
        by_search(majority(min(strongest, len(late)), len(regimes)), majority(min(our_counts), len(our_search))),
        tuple(sentences),
    )


def _with_all(regimes: Sequence[Regime]) -> list[Regime]:
    return [regime for regime in regimes if set(ADAPTIVE) <= set(regime.methods)]


def _strongest(regimes: Sequence[Regime]) -> int:
    return sum(all(r.mean(ADAM) >= r.mean(name) for name in OTHERS) for r in regimes)


def _late(regimes: Sequence[Regime]) -> list[Regime]:
    return [r for r in regimes if r.mean(FEDSOFIM, EARLY) - r.mean(ADAM, EARLY) > 1]
