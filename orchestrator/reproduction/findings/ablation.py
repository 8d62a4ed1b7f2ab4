"""What parts of DP-FedSOFIM contribute: the preconditioner, and the direction that it is applied to."""

from orchestrator.reproduction.findings.evidence import Evidence
from orchestrator.reproduction.findings.finding import FAILS, HOLDS, IN_PART, Finding, majority
from orchestrator.reproduction.paper_tables import FEDSOFIM

VARIANTS = ("full", "ema_only", "grad_only")


def preconditioner(evidence: Evidence) -> Finding | None:
    """Tables 10 and 11 of the DP-FedSOFIM paper."""
    by_variant = {(m.ours.setting, m.epsilon, m.method): m for m in evidence.matches if m.method in VARIANTS}
    regimes = dict.fromkeys((setting, epsilon) for setting, epsilon, _ in by_variant)
    pairs = [(by_variant.get((*regime, "full")), by_variant.get((*regime, "ema_only"))) for regime in regimes]
    known = [(full, momentum) for full, momentum in pairs if full and momentum]
    if not known:
        return None
    same_sign, overtaken, sentences = 0, 0, []
    for full, momentum in known:
        name = f"{full.ours.setting} at ε = {full.epsilon:g}"
        gain, paper_gain = full.our_mean - momentum.our_mean, full.paper_mean - momentum.paper_mean
        same_sign += (gain > 0) == (paper_gain > 0)
        sentences.append(
            f"{name}: the preconditioner adds {gain:+.2f} points to momentum alone (the paper: {paper_gain:+.2f})."
        )
        key = {"setting": full.ours.setting, "study": full.ours.study, "epsilon": full.epsilon, "finished": True}
        means = {name: [o.mean() for o in evidence.results.select(**key, method=name)] for name in VARIANTS}
        if all(means.values()):
            best = {name: max(values) for name, values in means.items()}
            overtaken += best["ema_only"] >= full.our_mean
            scores = ", ".join(f"{name} {score:.2f}" for name, score in best.items())
            sentences.append(f"{name}, each with the best of the paper's values for any budget: {scores}.")
    summary = f"The preconditioner helps or hurts as in the paper at {same_sign} of {len(known)} budgets."
    if overtaken:
        summary += (
            " But the gain depends on the step size: if momentum alone may use the paper's values for any budget, it "
            "is at least as good as the full method (with the values for the same budget) at "
            f"{overtaken} of {len(known)} budgets."
        )
    verdict = majority(same_sign, len(known))
    return Finding(
        "Ablation: the preconditioner helps most at ε = 1 and little elsewhere",
        IN_PART if overtaken and verdict == HOLDS else verdict,
        (summary, *sentences),
    )


def update_direction(evidence: Evidence) -> Finding | None:
    """The paper preconditions the gradient, its released program the momentum."""
    sentences, as_good = [], 0
    for published in evidence.results.select(method=FEDSOFIM, label_suffix="gradient direction", finished=True):
        key = {"setting": published.setting, "epsilon": published.epsilon, "label": FEDSOFIM}
        same = evidence.results.select(**key, study=published.study) or evidence.results.select(**key)
        if not same or not same[0].finished:
            continue
        as_good += published.mean() >= same[0].mean()
        sentences.append(
            f"{published.setting} at ε = {published.epsilon:g} ({published.study}): {published.mean():.2f} with the "
            f"gradient preconditioned, as published; {same[0].mean():.2f} with the momentum, as released."
        )
    if not sentences:
        return None
    return Finding(
        "DP-FedSOFIM as published is DP-FedSOFIM as released",
        HOLDS if as_good == len(sentences) else FAILS,
        (
            "The paper preconditions the gradient, the released program the momentum. Each tuned separately, the "
            f"published method is at least as good in {as_good} of {len(sentences)} regimes.",
            *sentences,
        ),
    )
