"""Why a number of ours differs from the paper's. A reason is given only if other numbers support it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.reproduction.matching import FIRST_ORDER, INDEPENDENT, UNIT_ROWS, Match
from orchestrator.reproduction.our_results import OurResults
from orchestrator.reproduction.paper_tables import FEDNEW, FEDSOFIM

COVARIANCE = "DP-FedFC"
EQUAL = 0.02
"""Two entries of a paper this close are taken to be the same run."""
DISTINCT = 0.5
"""Means of three seeds that differ by less count as equal."""


def explain(matches: Sequence[Match], results: OurResults) -> list[Match]:
    """The same matches, with reasons."""
    return [_explained(match, matches, results) for match in matches]


def _explained(match: Match, matches: Sequence[Match], results: OurResults) -> Match:
    eligible = match.comparable or (match.paper == FEDNEW and match.ours.as_released)
    if match.agrees or not match.final or not eligible:
        return match
    table = [m for m in matches if (m.paper, m.table, m.round) == (match.paper, match.table, match.round)]
    for kind, rule in RULES.get(match.paper, {}).items():
        if reason := rule(Case(match, table, results)):
            return replace(match, reason=reason, reason_kind=kind)
    return match


@dataclass(frozen=True)
class Case:
    """A difference to explain, with the evidence for it."""

    match: Match
    table: Sequence[Match]
    """All matches of the same table and round."""
    results: OurResults

    @property
    def same_method(self) -> list[Match]:
        """All results for the same published number, including `match`."""
        key = self.match.method, self.match.epsilon
        return [m for m in self.table if (m.method, m.epsilon) == key]

    @property
    def first_order(self) -> list[Match]:
        """DP-FedGD at the same budget."""
        return [m for m in self.table if m.method == FIRST_ORDER and m.epsilon == self.match.epsilon and m.ours.plain]


def _other_weights(case: Case) -> str:
    match, key = case.match, (case.match.epsilon, case.match.ours.study)
    differences = [m.difference for m in case.table if (m.epsilon, m.ours.study) == key and m.ours.plain]
    same_sign = sum(difference * match.difference > 0 for difference in differences)
    if match.ours.backbone != "VGG-16" or same_sign <= len(differences) / 2:
        return ""
    return (
        "The authors' VGG-16 weights were not released. Ours are different weights, and most methods shift in the same "
        "direction with them."
    )


def _beats_first_order(case: Case) -> str:
    """A large gamma turns DP-FedFC into DP-FedGD. The paper's DP-FedFC is no better than its DP-FedGD; our search found
    a better gamma."""
    match, gamma = case.match, case.match.ours.chosen.get("gamma")
    if match.method != COVARIANCE or gamma is None or match.difference < 0:
        return ""
    plain = {"method": FIRST_ORDER, "setting": match.ours.setting, "epsilon": match.epsilon, "plain": True}
    means = [ours.mean() for ours in case.results.select(**plain) if ours.finished]
    for other in filter(match.same_search, case.first_order):
        best = max([other.our_mean, *means])
        if match.paper_mean <= other.paper_mean + EQUAL and best < match.our_mean:
            return (
                f"With a large γ {COVARIANCE} equals {FIRST_ORDER}, and the paper's entry is no better than its "
                f"{FIRST_ORDER} ({other.paper_mean:.2f}). Our search chose γ = {gamma:.3g} and ends "
                f"{match.our_mean - best:.2f} points above the best {FIRST_ORDER} of all our searches ({best:.2f})."
            )
    return ""


def _independent_noise(case: Case) -> str:
    for other in case.same_method:
        if other.ours.label_suffix == INDEPENDENT and other.agrees:
            return (
                "With independent noise instead of tree noise, accounted for every round at the same ε, ours agrees: "
                f"it reaches {other.our_mean:.2f}. Noise for the whole tree costs the difference."
            )
    return ""


def _released_noise(case: Case) -> str:
    """The released program adds more or less noise than its eps needs."""
    match = case.match
    for other in case.same_method:
        actual = other.ours.actual_epsilon
        if not other.ours.as_released or math.isclose(actual, match.epsilon, rel_tol=0.05):
            continue
        amount = "too little" if actual > match.epsilon else "too much"
        start = (
            f"The released program adds {amount} noise: its actual ε is {format_epsilon(actual)}. With that noise it "
            f"reaches {other.our_mean:.2f}"
        )
        if other.difference * match.difference < 0 and not other.agrees:
            return f"{start}; the paper's {match.paper_mean:.2f} lies in between."
        if abs(other.difference) < abs(match.difference):
            return f"{start}, closer to the paper's {match.paper_mean:.2f}."
    return ""


def format_epsilon(epsilon: float) -> str:
    return "unbounded" if math.isinf(epsilon) else f"{epsilon:.3g}"


def _paper_took_one_step(case: Case) -> str:
    """With one local step the method is DP-FedGD, and the paper prints DP-FedGD's accuracy for it."""
    match, steps = case.match, case.match.ours.chosen.get("local_steps", 1)
    for other in case.first_order if match.method != FIRST_ORDER else ():
        if abs(other.paper_mean - match.paper_mean) > EQUAL:
            continue
        if match.difference > 0:
            chosen = f"; our search chose {steps} local steps, all accounted for" if steps != 1 else ""
            return f"The paper's entry equals its {FIRST_ORDER} ({other.paper_mean:.2f}) within {EQUAL:g}{chosen}."
        if steps != 1 and other.our_mean > match.our_mean:
            return (
                f"The paper's entry equals its {FIRST_ORDER}, which takes one local step. Our search chose {steps} on "
                f"the validation rows and ends below our {FIRST_ORDER} ({other.our_mean:.2f})."
            )
    return ""


def _below_tighter_budget(case: Case) -> str:
    """Less noise cannot make the same configuration worse, so the paper's search missed a better one."""
    match, key = case.match, (case.match.ours.study, case.match.ours.label)
    tighter = [m for m in case.table if (m.ours.study, m.ours.label) == key and m.epsilon < match.epsilon]
    above = [m for m in tighter if m.paper_mean - match.paper_mean > DISTINCT]
    if not above or match.difference < 0:
        return ""
    return (
        f"The paper's entry is below its own entry at the tighter ε = {above[-1].epsilon:g} "
        f"({above[-1].paper_mean:.2f}), so its search missed the best configuration of its grid."
    )


def _other_winner(case: Case) -> str:
    """Another search, which chose another configuration, gives the paper's number."""
    match = case.match
    for other in case.same_method:
        closer = abs(other.difference) < abs(match.difference) / 2  # a larger std alone can make it agree
        if not match.same_search(other) and other.ours.plain and closer and other.agrees:
            return (
                f"The chosen configuration decides: the winner of study {other.ours.study} ({other.ours.strategy}) "
                f"reaches {other.our_mean:.2f}."
            )
    return ""


def _scaffold_below_first_order(case: Case) -> str:
    """With one local step the control variates cancel in the mean, so DP-SCAFFOLD is DP-FedGD."""
    match = case.match
    for other in filter(match.same_search, case.first_order):
        if match.method == "DP-SCAFFOLD" and match.difference >= 0 and other.paper_mean > match.paper_mean:
            return (
                f"With one local step {match.method} equals {FIRST_ORDER}, and the paper's entry is below its own "
                f"{FIRST_ORDER} ({other.paper_mean:.1f}): its search missed the best configuration of its grid."
            )
    return ""


def _not_the_noise(case: Case) -> str:
    """Ours is above the paper's at much tighter budgets too, so noise is not the cause. Step sizes or row scales may
    be."""
    match = case.match
    same_search = [m for m in case.table if m.same_search(match)]
    tighter = [m for m in same_search if m.ours.label == match.ours.label and m.epsilon < match.epsilon]
    above = sorted((m for m in tighter if m.our_mean > match.paper_mean), key=lambda m: m.epsilon)
    unit_rows = [m for m in same_search if m.ours.label_suffix == UNIT_ROWS and m.epsilon == match.epsilon and m.agrees]
    if match.difference < 0 or not (above or unit_rows):
        return ""
    text = "The paper states neither step sizes nor the scale of its rows, which may explain it"
    for m in above[:1]:
        text = f"Not the noise: at ε = {m.epsilon:g} ours still reaches {m.our_mean:.2f}. {text}"
    for m in unit_rows[:1]:
        text += f": with rows of norm 1 and step size 1 our {m.method} reaches {m.our_mean:.2f}, "
        text += f"the paper's {m.paper_mean:.1f}"
    return f"{text}."


RULES: Mapping[str, Mapping[str, Callable[[Case], str]]] = {
    FEDSOFIM: {
        "different VGG-16 weights": _other_weights,
        "our search found a better γ": _beats_first_order,
        "tree noise": _independent_noise,
        "noise of the released program": _released_noise,
        "the paper took one local step": _paper_took_one_step,
        "the paper missed a better configuration": _below_tighter_budget,
        "another configuration was chosen": _other_winner,
    },
    FEDNEW: {
        "the paper missed a better configuration": _scaffold_below_first_order,
        "perhaps step sizes or row scale": _not_the_noise,
    },
}
"""Rules by paper, and by the kind of reason that they give. They are tried in this order until one applies."""
