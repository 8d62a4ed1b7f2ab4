"""The order of methods on CRC-5, our substitute for PathMNIST."""

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.render import Group, Table
from orchestrator.reproduction.our_results import OurResults
from orchestrator.reproduction.paper_tables import published


def crc5_table(results: OurResults) -> Table | None:
    """Table 4 of the DP-FedSOFIM paper. The images differ, so only the order of the methods can be compared."""
    published_rows = [row for row in published("fedsofim-accuracy") if row.table == 4 and row.round == 70]
    entries = [ours for ours in results.select(dataset="CRC-5", plain=True) if ours.finished]
    groups: dict[str, list[list[str]]] = {}
    records, correlations = [], []
    for key in dict.fromkeys((ours.study, ours.setting, ours.strategy, ours.epsilon) for ours in entries):
        study, setting, _, epsilon = key
        ours = {e.method: e.mean() for e in entries if (e.study, e.setting, e.strategy, e.epsilon) == key}
        paper = {row.method: row.mean for row in published_rows if row.epsilon == epsilon}
        means = pd.DataFrame({"paper": paper, "ours": ours}).dropna()
        if len(means) < 3:
            continue
        correlation = float(means["paper"].rank().corr(means["ours"].rank()))
        best = {"paper_best": str(means["paper"].idxmax()), "our_best": str(means["ours"].idxmax())}
        line = [budget(epsilon), *best.values(), f"{correlation:+.2f}", str(len(means))]
        groups.setdefault(f"{setting} ({study})", []).append(line)
        record = {"study": study, "setting": setting, "epsilon": epsilon, **best}
        records.append({**record, "rank_correlation": correlation, "methods": len(means)})
        correlations.append(correlation)
    if not records:
        return None
    return Table(
        title="CRC-5 in place of table 4 of the DP-FedSOFIM paper: the order of methods",
        summary=(
            "Table 4 of the DP-FedSOFIM paper, with CRC-5 in place of PathMNIST: the rank correlation with "
            f"the paper's order of the methods is {min(correlations):+.2f} to {max(correlations):+.2f}."
        ),
        caption=(
            "CRC-5 is not PathMNIST (see the findings), so accuracies cannot be compared. Compared is the order of the "
            "methods after the last round (Spearman's rank correlation; 1: the same order)."
        ),
        columns=["Budget", "Paper's best", "Our best", "Rank correlation", "Methods"],
        align="lllrr",
        groups=[Group(name, lines) for name, lines in groups.items()],
        data=pd.DataFrame(records),
    )
