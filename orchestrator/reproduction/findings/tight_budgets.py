"""DP-SCAFFOLD and DP-FTRL at tight budgets: phenomenon 4 of section 5.3 of the DP-FedSOFIM paper."""

from collections.abc import Sequence

from orchestrator.reproduction.findings.evidence import EARLY, TIGHT, Evidence, Regime
from orchestrator.reproduction.findings.finding import FAILS, HOLDS, IN_PART, Finding, listed, majority
from orchestrator.reproduction.matching import FIRST_ORDER, INDEPENDENT
from orchestrator.reproduction.paper_tables import FEDSOFIM


def scaffold(evidence: Evidence) -> Finding | None:
    name = "DP-SCAFFOLD"
    tight = [regime for regime in evidence.regimes if regime.epsilon in TIGHT and name in regime.methods]
    if not tight:
        return None
    behind = sum(r.mean(FIRST_ORDER) - r.mean(name) > 1 for r in tight)
    released = _released(evidence, name, tight)
    released_behind = sum(r.mean(FIRST_ORDER) - mean > 1 for r, mean in released)
    summary = (
        f"With noise calibrated to ε it is more than a point behind DP-FedGD in {behind} of {len(tight)} tight regimes."
    )
    if released:
        summary += (
            " As released, with more noise than its ε needs, it is that far behind in "
            f"{released_behind} of {len(released)}."
        )
    sentences = [
        f"{r.name}: {r.mean(name):.2f} with calibrated noise, DP-FedGD {r.mean(FIRST_ORDER):.2f}, DP-FedSOFIM "
        f"{r.mean(FEDSOFIM):.2f}."
        for r in tight
    ]
    return Finding(
        "Phenomenon 4, first part: DP-SCAFFOLD degrades under tight privacy",
        by_noise(majority(behind, len(tight)), majority(released_behind, len(released))),
        (summary, *sentences),
    )


def ftrl(evidence: Evidence) -> Finding | None:
    name = "DP-FTRL"
    regimes = [regime for regime in evidence.regimes if name in regime.methods]
    if not regimes:
        return None
    leads = [r for r in regimes if r.best() == name]
    slow = sum(r.mean(name, EARLY) < r.mean(FIRST_ORDER, EARLY) - 1 for r in regimes)
    released = _released(evidence, name, regimes)
    released_leads = [r for r, mean in released if mean > max(r.others(name).values())]
    summary = (
        f"With noise calibrated for the whole tree DP-FTRL leads at the end in {len(leads)} of {len(regimes)} regimes"
        f"{_where(leads)}."
    )
    if released:
        summary += (
            f" As released, with less noise than its ε needs, it would lead in {len(released_leads)} of "
            f"{len(released)}{_where(released_leads)}."
        )
    early = f"At round {EARLY} it is more than a point behind DP-FedGD in {slow} of {len(regimes)}."
    return Finding(
        "Phenomenon 4, second part: DP-FTRL has an advantage at the tightest budget only",
        by_noise(only_at_tightest(leads), only_at_tightest(released_leads)),
        (summary, early, *_independent_noise(evidence)),
    )


def _where(regimes: Sequence[Regime]) -> str:
    return f": {listed([regime.name for regime in regimes])}" if regimes else ""


def only_at_tightest(leads: Sequence[Regime]) -> str:
    """Verdict on the claim that a method leads at the tightest budget only. `leads`: the regimes in which it leads."""
    budgets = {regime.epsilon for regime in leads}
    if min(TIGHT) not in budgets or budgets - set(TIGHT):
        return FAILS
    return HOLDS if len(budgets) == 1 else IN_PART


def by_noise(calibrated: str, released: str) -> str:
    """One verdict, or both if the claim holds only with the noise of the released program."""
    if calibrated == FAILS and released in (HOLDS, IN_PART):
        return f"depends on the noise: {released} as released, {calibrated} with noise calibrated to ε"
    return calibrated


def _released(evidence: Evidence, name: str, regimes: Sequence[Regime]) -> list[tuple[Regime, float]]:
    """The final accuracy of the released program in these regimes, where known."""
    means = []
    for regime in regimes:
        key = {"setting": regime.setting, "epsilon": regime.epsilon, "paper_search": regime.paper_search}
        released = evidence.results.select(method=name, as_released=True, finished=True, **key)
        means += [(regime, ours.mean()) for ours in released[:1]]
    return means


def _independent_noise(evidence: Evidence) -> list[str]:
    tested = [match for match in evidence.matches if match.final and match.ours.label_suffix == INDEPENDENT]
    if not tested:
        return []
    means = ", ".join(f"{m.our_mean:.2f} at ε = {m.epsilon:g} (the paper {m.paper_mean:.2f})" for m in tested)
    return [
        f"With independent noise in place of tree noise, accounted for every round, it reaches {means}: "
        f"{sum(match.agrees for match in tested)} of {len(tested)} agree with the paper, which describes a tree."
    ]
