"""The best method at every budget, in the papers and in our studies."""

import math
from collections.abc import Sequence

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.render import Group, Table
from orchestrator.reproduction.matching import Match, tuned_for
from orchestrator.reproduction.our_results import OurResult, OurResults


def winners_table(results: OurResults, matches: Sequence[Match]) -> Table:
    groups: dict[str, list[list[str]]] = {}
    records = []
    for key in dict.fromkeys((ours.study, ours.setting, ours.epsilon) for ours in results.results):
        study, setting, epsilon = key
        same = [m for m in matches if (m.ours.study, m.ours.setting, m.epsilon) == key and m.final]
        paper = {match.method: match.paper_mean for match in same}
        candidates = results.select(study=study, setting=setting, epsilon=epsilon)
        candidates = [ours for ours in candidates if epsilon in (tuned_for(ours) or [epsilon])]
        best = best_of(candidates)
        if not best or len({ours.label for ours in candidates}) < 2 or len(paper) < 2:
            continue
        paper_mean, our_mean = max(paper.values()), best[0].mean()
        paper_best = " and ".join(name for name, mean in paper.items() if mean == paper_mean)
        our_best = " and ".join(ours.label for ours in best)
        line = [budget(epsilon), paper_best, f"{paper_mean:.2f}", our_best, f"{our_mean:.2f}"]
        groups.setdefault(f"{setting} ({study})", []).append(line)
        record = {"study": study, "setting": setting, "epsilon": epsilon, "paper_best": paper_best}
        records.append({**record, "paper_mean": paper_mean, "our_best": our_best, "our_mean": our_mean})
    equal = sum(record["paper_best"] == record["our_best"] for record in records)
    return Table(
        title="The best method at every budget",
        summary=f"The best method at every budget: the same as in the paper in {equal} of {len(records)} regimes.",
        caption=(
            "Test accuracy (%) after the last round. Paper: the best of the methods that ran here. Ours: the best mean "
            "among methods whose actual ε is at most the claimed ε; released programs are left out."
        ),
        columns=["Budget", "Paper's best", "Accuracy (%)", "Our best", "Accuracy (%)"],
        align="llrlr",
        groups=[Group(name, lines) for name, lines in groups.items()],
        data=pd.DataFrame(records),
    )


def best_of(candidates: Sequence[OurResult]) -> list[OurResult]:
    """The results with the best final mean, to two decimals, among methods that are as private as they claim."""
    means = {ours: round(ours.mean(), 2) for ours in candidates if ours.private_as_claimed and ours.finished}
    top = max(means.values(), default=math.nan)
    return [ours for ours, mean in means.items() if mean == top]
