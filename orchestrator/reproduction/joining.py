"""The papers' numbers joined with ours, entry by entry, with a reason where they differ and the numbers give one."""

from __future__ import annotations

import contextlib
import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

from orchestrator.reproduction.ours import Entry, Ours
from trainables.spec import HyperValue

LEAST = 1.0
"""Points of accuracy that are no difference, however small the deviations."""
FEDSOFIM, FEDNEW, HEART = "DP-FedSOFIM", "DP-FedNew", "heart disease"
FIRST_ORDER, COVARIANCE = "DP-FedGD", "DP-FedFC"
WITHOUT_DUALS = "without duals"
INDEPENDENT, UNIT_ROWS = "independent noise", "unit rows and step 1"
"""Variants that a study labels so; the last two try what may explain a difference."""


@cache
def numbers(name: str) -> tuple[Any, ...]:
    """One of the papers' tables as printed there: a row has its columns as attributes, numbers where they are."""
    file = resources.files(__name__.rpartition(".")[0]) / "numbers" / f"{name}.csv"
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return tuple(SimpleNamespace(**{key: _value(text) for key, text in row.items()}) for row in rows)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@dataclass(frozen=True)
class Joined:
    """One number of a paper beside one of ours."""

    paper: str
    table: int
    method: str
    round: int
    paper_mean: float
    paper_std: float
    """nan where the paper gives none."""
    entry: Entry
    our_mean: float
    our_std: float
    reason: str = ""

    @property
    def epsilon(self) -> float:
        return self.entry.epsilon

    @property
    def last(self) -> bool:
        return self.round == self.entry.cell.last

    @property
    def difference(self) -> float:
        return self.our_mean - self.paper_mean

    @property
    def allowed(self) -> float:
        """Two standard deviations of the difference between a run of theirs and one of ours, and at least a point."""
        spread = math.hypot(*(s for s in (self.paper_std, self.our_std) if not math.isnan(s)))
        return max(LEAST, 2 * spread)

    @property
    def within(self) -> bool:
        return abs(self.difference) <= self.allowed

    @property
    def stands(self) -> bool:
        """Whether ours is the method itself at the eps it claims. DP-FedNew with duals never is; without them it is."""
        return self.entry.plain or (self.entry.honest and self.entry.variant == WITHOUT_DUALS)


def join(ours: Ours) -> list[Joined]:
    pairs = [*_fedsofim(ours), *_ablation(ours), *_rho(ours), *_fednew(ours), *_heart(ours)]
    return [Joined(**{**pair.__dict__, "reason": reason_for(pair, pairs, ours)}) for pair in pairs]


def _pair(paper: str, table: int, method: str, t: int, mean: float, std: float, entry: Entry) -> list[Joined]:
    score = entry.mean(t)
    return [] if score is None else [Joined(paper, table, method, t, mean, std, entry, score, entry.std(t))]


def _fedsofim(ours: Ours) -> list[Joined]:
    found = []
    for entry in ours.of(clients=20):
        same = (entry.dataset, entry.backbone, entry.partition, entry.method, entry.epsilon)
        for row in numbers("fedsofim-accuracy"):
            if (row.dataset, row.backbone, row.partition, row.method, row.epsilon) == same:
                found += _pair(FEDSOFIM, row.table, entry.method, row.round, row.mean, row.std, entry)
    return sorted(found, key=lambda pair: pair.table)


def _ablation(ours: Ours) -> list[Joined]:
    found = []
    for row in numbers("fedsofim-ablation"):
        for entry in ours.of(dataset=row.dataset, method=row.variant, epsilon=row.epsilon):
            if _is_for(entry):
                found += _pair(FEDSOFIM, row.table, row.variant, entry.cell.last, row.mean, row.std, entry)
    return found


def _rho(ours: Ours) -> list[Joined]:
    found = []
    for row in numbers("fedsofim-rho"):
        for entry in ours.of(dataset=row.dataset, method=f"ρ = {row.rho:g}", epsilon=row.epsilon):
            if _is_for(entry):
                found += _pair(FEDSOFIM, row.table, entry.method, entry.cell.last, row.mean, row.std, entry)
    return found


def _is_for(entry: Entry) -> bool:
    """Whether this is the budget that the values in the label were tuned for: `full (ε 5 and 10)`."""
    stated = entry.variant.removeprefix("ε ").split(" and ")
    return f"{entry.epsilon:g}" in stated


def tuned_elsewhere(entry: Entry) -> bool:
    """Whether its label says that its values were tuned for other budgets."""
    return entry.variant.startswith("ε ") and not _is_for(entry)


def _fednew(ours: Ours) -> list[Joined]:
    found = []
    for row in numbers("fednew-accuracy"):
        same = {"dataset": row.dataset, "backbone": row.backbone, "partition": row.partition, "clients": row.clients}
        for entry in ours.of(**same, method=row.method, epsilon=row.epsilon):
            found += _pair(FEDNEW, row.table, row.method, entry.cell.last, row.mean, math.nan, entry)
    return found


def _heart(ours: Ours) -> list[Joined]:
    found = []
    for row in numbers("heart-accuracy"):
        for entry in ours.of(dataset=row.dataset, method=row.method, epsilon=float(row.epsilon)):
            found += _pair(HEART, 0, row.method, entry.cell.last, row.mean, math.nan, entry)
    return found


# ---- reasons


def reason_for(pair: Joined, pairs: list[Joined], ours: Ours) -> str:
    """Why ours is not the paper's: one sentence, or none where the numbers bear none out."""
    asked = pair.stands or (pair.paper == FEDNEW and pair.entry.cell.method.as_released)
    if pair.within or not pair.last or not asked:
        return ""
    rules = {FEDNEW: _FEDNEW_RULES, FEDSOFIM: _RULES}.get(pair.paper, ())
    same = [p for p in pairs if (p.paper, p.table, p.round) == (pair.paper, pair.table, pair.round)]
    return next(filter(None, (rule(pair, same, ours) for rule in rules)), "")


def _other_noise(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """As released the method adds another amount of noise than its eps needs."""
    for other in same:
        released = other.entry.cell.method.as_released
        if not released or other.method != pair.method or other.epsilon != pair.epsilon:
            continue
        actual = other.entry.actual_epsilon
        if math.isclose(actual, pair.epsilon, rel_tol=0.05):
            continue
        more = "too little" if actual > pair.epsilon else "too much"
        start = (
            f"The released program adds {more} noise and buys {_shown(actual)}; run so it reaches {other.our_mean:.2f}"
        )
        if other.difference * pair.difference < 0 and not other.within:
            return f"{start}: the paper's {pair.paper_mean:.2f} lies between."
        if abs(other.difference) < abs(pair.difference):
            return f"{start}, nearer to the paper's {pair.paper_mean:.2f}."
    return ""


def _without_the_tree(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """Independent noise, paid for in every round, gives the paper's number."""
    for other in same:
        tried = other.entry.variant == INDEPENDENT and (other.method, other.epsilon) == (pair.method, pair.epsilon)
        if tried and other.within:
            return (
                f"Without a tree ours agrees: with independent noise, priced for every round at the same ε, it reaches "
                f"{other.our_mean:.2f}; the noise of a whole tree costs the rest."
            )
    return ""


def _shown(actual: float) -> str:
    return "no bounded ε" if math.isinf(actual) else f"ε = {actual:.3g}"


def _other_weights(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """Where most methods lie on the same side of the paper: other features move all of them."""
    if pair.entry.backbone not in OTHER_WEIGHTS:
        return ""
    beside = [p for p in same if p.epsilon == pair.epsilon and p.entry.study == pair.entry.study and p.entry.plain]
    alike = sum(p.difference * pair.difference > 0 for p in beside)
    return OTHER_WEIGHTS[pair.entry.backbone] if alike > len(beside) / 2 else ""


def _same_as_first_order(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """The paper's search ended at one local step, which is DP-FedGD."""
    for other in same:
        twin = other.method == FIRST_ORDER != pair.method and other.epsilon == pair.epsilon
        if twin and abs(other.paper_mean - pair.paper_mean) <= 0.02 and pair.difference > 0:
            steps = _chosen(pair).get("local_steps")
            ended = f"; ours ends at {steps} local steps, each paid for" if steps not in (None, 1) else ""
            return f"The paper's entry is its {FIRST_ORDER}'s ({other.paper_mean:.2f}) to within 0.02{ended}."
    return ""


def _no_better_than_first_order(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """A large gamma makes DP-FedFC the same as DP-FedGD: no search that looks there ends below it."""
    gamma = _chosen(pair).get("gamma")
    if pair.method != COVARIANCE or gamma is None or pair.difference < 0:
        return ""
    plain = ours.of(method=FIRST_ORDER, setting=pair.entry.setting, epsilon=pair.epsilon, plain=True)
    means = [mean for entry in plain if (mean := entry.mean()) is not None]
    for other in same:
        twin = other.method == FIRST_ORDER and other.epsilon == pair.epsilon and other.entry.plain
        best = max([other.our_mean, *means])
        if twin and _beside(other, pair) and pair.paper_mean <= other.paper_mean + 0.02 and best < pair.our_mean:
            return (
                f"With a large γ {COVARIANCE} is {FIRST_ORDER}, and the paper's entry is no better than that "
                f"({other.paper_mean:.2f}); our search chose γ = {gamma:.3g} and ends {pair.our_mean - best:.2f} "
                f"points above the best {FIRST_ORDER} of any of our searches ({best:.2f})."
            )
    return ""


def _chose_more_steps(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """The paper took one local step, which is DP-FedGD; our search took more and lost by it."""
    for other in same:
        twin = other.method == FIRST_ORDER != pair.method and other.epsilon == pair.epsilon and other.entry.plain
        steps = _chosen(pair).get("local_steps")
        told_apart = other.our_mean > pair.our_mean and steps not in (None, 1)
        if twin and abs(other.paper_mean - pair.paper_mean) <= 0.02 and told_apart:
            return (
                f"The paper's entry is its {FIRST_ORDER}'s, one local step; our search chose {steps} on the validation "
                f"rows and ends below our own {FIRST_ORDER} ({other.our_mean:.2f})."
            )
    return ""


def _below_a_tighter_budget(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """With less noise the same configuration can only do better: the paper's search missed it."""
    tighter = [p for p in same if p.method == pair.method and p.entry == _at(pair, p)]
    worse = [p for p in tighter if p.epsilon < pair.epsilon and p.paper_mean - pair.paper_mean > TOLD_APART]
    if not worse or pair.difference < 0:
        return ""
    other = worse[-1]
    return (
        f"The paper's entry lies below its own at the tighter ε = {other.epsilon:g} ({other.paper_mean:.2f}), so its "
        "search had not found the best of its grid."
    )


def _at(pair: Joined, other: Joined) -> Entry | None:
    same = other.entry.study == pair.entry.study and other.entry.label == pair.entry.label
    return other.entry if same else None


def _choice_moves_it(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """Another way of choosing the winner gives the paper's number."""
    for other in same:
        strategy = (other.entry.study, other.entry.strategy) != (pair.entry.study, pair.entry.strategy)
        alike = strategy and other.entry.plain and (other.method, other.epsilon) == (pair.method, pair.epsilon)
        nearer = abs(other.difference) < abs(pair.difference) / 2  # or else it is within for its larger spread alone
        if alike and nearer and other.within:
            return (
                "Which configuration is chosen decides: the winner of study "
                f"{other.entry.study} ({other.entry.strategy}) reaches {other.our_mean:.2f}."
            )
    return ""


def _below_one_local_step(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """With one local step the control variates cancel in the mean, and DP-SCAFFOLD is DP-FedGD."""
    if pair.method != "DP-SCAFFOLD" or pair.difference < 0:
        return ""
    for other in same:
        twin = other.method == FIRST_ORDER and other.epsilon == pair.epsilon and other.entry.plain
        if twin and _beside(other, pair) and other.paper_mean > pair.paper_mean:
            return (
                f"With one local step {pair.method} is {FIRST_ORDER}, and the paper's entry lies below its own "
                f"{FIRST_ORDER}'s ({other.paper_mean:.1f}): its search had not found the best of its grid."
            )
    return ""


def _not_the_noise(pair: Joined, same: list[Joined], ours: Ours) -> str:
    """At a far tighter budget ours is still above the paper's: noise does not explain it. Steps and scales may."""
    beside = [p for p in same if _beside(p, pair)]
    tighter = [p for p in beside if p.entry.label == pair.entry.label and p.epsilon < pair.epsilon]
    above = [p for p in tighter if p.our_mean > pair.paper_mean]
    short = [p for p in beside if p.entry.variant == UNIT_ROWS and p.epsilon == pair.epsilon and p.within]
    if pair.difference < 0 or not (above or short):
        return ""
    far = min(above, key=lambda p: p.epsilon) if above else None
    noise = f"Not the noise: at ε = {far.epsilon:g} ours still reaches {far.our_mean:.2f}. " if far else ""
    steps = "Steps too small for the rounds may explain it, or rows of another scale; the paper prints neither"
    tried = (
        f": with rows of length 1 and a step of 1 our {short[0].method} comes to {short[0].our_mean:.2f}, the paper's "
        f"to {short[0].paper_mean:.1f}"
        if short
        else ""
    )
    return f"{noise}{steps}{tried}."


def _beside(one: Joined, other: Joined) -> bool:
    return (one.entry.study, one.entry.strategy) == (other.entry.study, other.entry.strategy)


def _chosen(pair: Joined) -> dict[str, HyperValue]:
    return pair.entry.cell.search.chosen or {}


OTHER_WEIGHTS = {
    "VGG-16": "The authors' VGG-16 was not released: these are another's features, and most methods move the same way "
    "with them."
}
TOLD_APART = 0.5
"""Points by which means of three seeds differ at least before something is made of it."""
_RULES = (
    _other_weights,
    _no_better_than_first_order,
    _without_the_tree,
    _other_noise,
    _same_as_first_order,
    _chose_more_steps,
    _below_a_tighter_budget,
    _choice_moves_it,
)
"""In the order in which they are tried: the first whose numbers bear it out is given."""
_FEDNEW_RULES = (_below_one_local_step, _not_the_noise)
