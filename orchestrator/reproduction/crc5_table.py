"""The order of methods on CRC-5, our substitute for PathMNIST."""

from __future__ import annotations

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.render import Group, Table
from orchestrator.reproduction.our_results import OurResults
from orchestrator.reproduction.paper_tables import published


def crc5_table(results: OurResults) -> Table | None:
    """Table 4 of the DP-FedSOFIM paper. The images differ, so only the order of the methods can be compared."""
    published_rows = [row for row in published("fedsofim-accuracy") if row.table == 4 and row.round == 70]
    entries = [ours for ours in results.select(dataset="CRC-5", plain=True) if ours.finished]
    groups, records = [], []
    for study, setting, strategy in dict.fromkeys((ours.study, ours.setting, ours.strategy) for ours in entries):
        lines = []
        for epsilon in dict.fromkeys(ours.epsilon for ours in entries):
            key = study, setting, strategy, epsilon
            ours = {e.method: e.mean() for e in entries if (e.study, e.setting, e.strategy, e.epsilon) == key}
            paper = {row.method: row.mean for row in published_rows if row.epsilon == epsilon}
            both = pd.DataFrame({"paper": paper, "ours": ours}).dropna()
            if len(both) < 3:
                continue
            correlation = float(both["paper"].rank().corr(both["ours"].rank()))
            paper_best, our_best = str(both["paper"].idxmax()), str(both["ours"].idxmax())
            lines.append([budget(epsilon), paper_best, our_best, f"{correlation:+.2f}", str(len(both))])
            record = {"study": study, "setting": setting, "epsilon": epsilon, "paper_best": paper_best}
            records.append(
                {**record, "our_best": our_best, "rank_correlation": correlation, "methods": len(both)}
            )
        if lines:
            groups.append(Group(f"{setting} ({study})", lines))
    if not groups:
        return None
    correlations = [record["rank_correlation"] for record in records]
    return Table(
        title="CRC-5 in place of table 4 of the DP-FedSOFIM paper: the order of methods",
        summary=(
            "Table 4 of the DP-FedSOFIM paper, with CRC-5 in place of PathMNIST: the rank correlation of the methods "
            f"is {min(correlations):+.2f} to {max(correlations):+.2f}."
        ),
        caption=(
            "CRC-5 is not PathMNIST (see the findings), so accuracies cannot be compared. Compared is the order of the "
            "methods after the last round (Spearman's rank correlation; 1: the same order)."
        ),
        columns=["Budget", "Paper's best", "Our best", "Rank correlation", "Methods"],
        align="lllrr",
        groups=groups,
        data=pd.DataFrame(records),
    )
