"""Early rounds, final accuracy, and how soon DP-FedNew reaches DP-FedGD."""

from orchestrator.reproduction.findings.evidence import EARLY, JOINT, LOOSE, MIDDLE, Evidence, leads
from orchestrator.reproduction.findings.finding import Finding, both, by_search, listed, majority
from orchestrator.reproduction.matching import FIRST_ORDER, WITHOUT_DUALS
from orchestrator.reproduction.paper_tables import FEDNEW, FEDSOFIM


def early_rounds(evidence: Evidence) -> Finding | None:
    """Phenomenon 1 of section 5.3 of the DP-FedSOFIM paper."""
    early = leads(evidence.regimes, EARLY)
    if not early:
        return None
    first = sum(lead >= -JOINT for _, lead in early)
    loose = [regime for regime, _ in early if regime.epsilon in LOOSE]
    faster = sum(regime.mean(FEDSOFIM, EARLY) > regime.mean(FIRST_ORDER, EARLY) for regime in loose)
    behind = [f"{r.name}, by {-lead:.2f} to {r.best(EARLY)}" for r, lead in early if lead < -JOINT]
    sentences = [
        f"After round {EARLY}, DP-FedSOFIM is best or within {JOINT:g} points of the best in {first} of {len(early)} "
        f"regimes. At the larger budgets it is then ahead of DP-FedGD in {faster} of {len(loose)}.",
        *([f"It is behind in: {listed(behind)}."] if behind else []),
        *_with_our_search(evidence, EARLY),
        *_with_the_authors_values(evidence),
        f"Winners were chosen by their final accuracy; no search optimised the accuracy at round {EARLY}.",
    ]
    for regime in loose:
        target = 0.95 * regime.mean(FIRST_ORDER)
        rounds = [regime.methods[method].first_round_at(target) for method in (FEDSOFIM, FIRST_ORDER)]
        reached = ["never" if t is None else f"at round {t}" for t in rounds]
        sentences.append(
            f"{regime.name}: {regime.mean(FEDSOFIM, EARLY):.2f} against {regime.mean(FIRST_ORDER, EARLY):.2f} for "
            f"DP-FedGD at round {EARLY}. DP-FedSOFIM reaches 95% of DP-FedGD's final accuracy {reached[0]}, DP-FedGD "
            f"{reached[1]}."
        )
    verdict = both(majority(first, len(early)), majority(faster, len(loose)))
    return Finding("Phenomenon 1: DP-FedSOFIM converges fastest in early rounds", verdict, tuple(sentences))


def _with_our_search(evidence: Evidence, t: int | None = None) -> list[str]:
    ours = [lead for _, lead in leads(evidence.our_search, t)]
    first, near = sum(lead >= 0 for lead in ours), sum(lead >= -JOINT for lead in ours)
    text = f"With our search it is best in {first} of {len(ours)}, and best or within {JOINT:g} points in {near}."
    return [text] if ours else []


def _with_the_authors_values(evidence: Evidence) -> list[str]:
    """DP-FedSOFIM with the hyperparameters that the authors chose for the budget, from the ablation study."""
    means = []
    for match in evidence.matches:
        key = match.ours.setting, match.epsilon
        same = [regime for regime in evidence.regimes if (regime.setting, regime.epsilon) == key]
        if match.method == "full" and same and EARLY in match.ours.curve:
            others = same[0].others(FEDSOFIM, EARLY)
            best = max(others, key=lambda name: others[name])
            means.append(f"{match.ours.mean(EARLY):.2f} in {same[0].name} ({best} {others[best]:.2f})")
    return [f"With the authors' hyperparameters it reaches at that round: {'; '.join(means)}."] if means else []


def final_accuracy(evidence: Evidence) -> Finding | None:
    """Phenomenon 2 of section 5.3 of the DP-FedSOFIM paper."""
    final, middle, ours = leads(evidence.regimes), leads(evidence.regimes, MIDDLE), leads(evidence.our_search)
    if not final:
        return None
    first, near = sum(lead >= 0 for _, lead in final), sum(-JOINT <= lead < 0 for _, lead in final)
    sentences = [
        f"After the last round DP-FedSOFIM is best in {first} of {len(final)} regimes, and within {JOINT:g} points of "
        f"the best in {near} more."
    ]
    if middle:
        ahead = [f"{regime.name}, by {lead:.2f}" for regime, lead in middle if lead >= 0]
        where = f": {listed(ahead, 8)}" if ahead else ""
        sentences.append(f"At round {MIDDLE} it is best in {len(ahead)} of {len(middle)}{where}.")
    if behind := [f"{regime.name}: {regime.best()} leads by {-lead:.2f}" for regime, lead in final if lead < 0]:
        sentences.append(f"Where it is not best: {listed(behind, 8)}.")
    return Finding(
        "Phenomenon 2: DP-FedSOFIM leads at the end in most regimes, and saturates early in the others",
        by_search(majority(first, len(final)), majority(sum(lead >= 0 for _, lead in ours), len(ours))),
        (*sentences, *_with_our_search(evidence)),
    )


def fednew_speed(evidence: Evidence) -> Finding | None:
    """Section 6.6 and figure 4 of the DP-FedNew paper."""
    sentences, in_time = [], 0
    for ours in evidence.results.select(method=FEDNEW, label_suffix=WITHOUT_DUALS, finished=True):
        regime = {"study": ours.study, "setting": ours.setting, "epsilon": ours.epsilon}
        for baseline in evidence.results.select(**regime, label=FIRST_ORDER, finished=True)[:1]:
            reached = ours.first_round_at(baseline.mean())
            in_time += reached is not None and reached <= ours.last_round / 4
            when = "never reaches it" if reached is None else f"reaches it at round {reached} of {ours.last_round}"
            sentences.append(
                f"{ours.setting}, {ours.clients} clients, ε = {ours.epsilon:g}: DP-FedGD ends at "
                f"{baseline.mean():.2f}; DP-FedNew {when} and ends at {ours.mean():.2f}."
            )
    if not sentences:
        return None
    return Finding(
        "DP-FedNew reaches DP-FedGD's final accuracy in a quarter of the rounds",
        majority(in_time, len(sentences)),
        (
            f"It does in {in_time} of {len(sentences)} regimes. Only evaluated rounds count. DP-FedNew runs without "
            "duals, so that its noise can be accounted for under secure aggregation.",
            *sentences,
        ),
    )
