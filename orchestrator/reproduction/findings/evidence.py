"""What findings are computed from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.reproduction.matching import FIRST_ORDER, Match
from orchestrator.reproduction.our_results import OurResult, OurResults
from orchestrator.reproduction.paper_tables import FEDSOFIM

EARLY, MIDDLE = 10, 30
"""The round that the paper calls early, and the round by which, according to the paper, some methods saturate."""
TIGHT, LOOSE = (0.5, 1.0), (5.0, 10.0)
"""Values of eps."""
JOINT = 0.5
"""Points within which the paper speaks of a joint best (three of its margins are 0.03 to 0.37)."""
OTHER_DRAW, PER_SEED = " (partition ", " (partition by seed)"
"""Suffixes of data set labels: a partition drawn with another seed, or a new one for every seed."""


@dataclass(frozen=True)
class Regime:
    """The plain methods of one study in one setting at one budget, with one search variant."""

    setting: str
    epsilon: float
    paper_search: bool
    methods: dict[str, OurResult]

    @property
    def name(self) -> str:
        return f"{self.setting} at ε = {self.epsilon:g}"

    def mean(self, method: str, t: int | None = None) -> float:
        return self.methods[method].mean(t)

    def others(self, method: str, t: int | None = None) -> dict[str, float]:
        """The means of all other methods, where known."""
        means = {name: ours.mean(t) for name, ours in self.methods.items() if name != method}
        return {name: mean for name, mean in means.items() if not math.isnan(mean)}

    def lead(self, t: int | None = None) -> float:
        """DP-FedSOFIM minus the best other method; nan if unknown."""
        return self.mean(FEDSOFIM, t) - max(self.others(FEDSOFIM, t).values(), default=math.nan)

    def best(self, t: int | None = None) -> str:
        means = {**self.others(FEDSOFIM, t), FEDSOFIM: self.mean(FEDSOFIM, t)}
        return max(means, key=lambda name: means[name])


@dataclass(frozen=True)
class Evidence:
    results: OurResults
    matches: Sequence[Match]

    @cached_property
    def _all_regimes(self) -> list[Regime]:
        """All regimes with DP-FedSOFIM, DP-FedGD and at least one other method, except on other partition draws."""
        methods: dict[tuple[str, str, str, float], dict[str, OurResult]] = {}
        for ours in self.results.select(plain=True, finished=True):
            if OTHER_DRAW not in ours.setting:
                key = ours.study, ours.setting, ours.strategy, ours.epsilon
                methods.setdefault(key, {})[ours.method] = ours
        return [
            Regime(setting, epsilon, named[FEDSOFIM].paper_search, named)
            for (_, setting, _, epsilon), named in methods.items()
            if {FEDSOFIM, FIRST_ORDER} < set(named)
        ]

    @cached_property
    def regimes(self) -> list[Regime]:
        """The regimes with the papers' search, so that no setting counts twice; all regimes if there are none."""
        return [regime for regime in self._all_regimes if regime.paper_search] or self._all_regimes

    @cached_property
    def our_search(self) -> list[Regime]:
        """The regimes with our search; empty if `regimes` has them."""
        return [regime for regime in self._all_regimes if regime not in self.regimes]


def leads(regimes: Sequence[Regime], t: int | None = None) -> list[tuple[Regime, float]]:
    """DP-FedSOFIM's lead in every regime, where known."""
    return [(regime, lead) for regime in regimes if not math.isnan(lead := regime.lead(t))]
