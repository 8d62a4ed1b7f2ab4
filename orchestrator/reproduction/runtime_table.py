"""Seconds per round: table 7 of the DP-FedSOFIM paper."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from orchestrator.report.tables.render import Group, Table
from orchestrator.reproduction.our_results import OurResult, OurResults
from orchestrator.reproduction.paper_tables import FEDSOFIM, published, table_name


def runtime_table(results: OurResults) -> Table | None:
    records = []
    for dataset in ("CIFAR-10", "PathMNIST"):
        for backbone in ("ResNet-20", "VGG-16"):
            setting = f"{dataset} / {backbone} / dirichlet:0.5"
            column = f"{dataset}_{backbone}_s".lower().replace("-", "")
            for row in published("fedsofim-runtime"):
                same_method = results.select(setting=setting, label=row.method, paper_search=True)
                timed = [ours for ours in same_method if is_timed(ours, row.setting)]
                seconds = [s for ours in timed for s in ours.seconds_per_round]
                if seconds:
                    steps = ", ".join(dict.fromkeys(str(ours.chosen.get("local_steps", 1)) for ours in timed))
                    record = {"setting": setting, "method": row.method, "paper_setting": row.setting}
                    record |= {"paper_s": getattr(row, column), "our_local_steps": steps}
                    records.append({**record, "our_s": sum(seconds) / len(seconds)})
    return build_table(records) if records else None


def is_timed(ours: OurResult, paper_setting: str) -> bool:
    """Whether a row of table 7 covers the budget of our result. `paper_setting` is `eps 0.5, K = 1`, `eps >= 1, K = 5`
    or similar; an empty text covers all budgets."""
    budget = re.match(r"eps (>= )?([\d.]+)", paper_setting)
    if budget is None:
        return True
    return ours.epsilon >= float(budget[2]) if budget[1] else ours.epsilon == float(budget[2])


def build_table(records: Sequence[dict[str, Any]]) -> Table:
    def line(record: dict[str, Any]) -> list[str]:
        times = f"{record['paper_s']:.2f}", record["our_local_steps"], f"{record['our_s']:.2g}"
        return [record["method"], record["paper_setting"] or "all", *times]

    settings = dict.fromkeys(record["setting"] for record in records)
    name = table_name(FEDSOFIM, 7)
    return Table(
        title=f"{name} and our results: seconds per round",
        summary=f"{name} (seconds per round): not comparable, because our trials share one vectorised computation.",
        caption=(
            "The paper trains one run at a time. Our trials run together in packs, and a trial's seconds are its share "
            "of the pack's time, which makes them small. Our seconds are means over the budgets of the paper's row; "
            "our K is the number of local steps that our search chose for them. All times depend on the machine."
        ),
        columns=["Method", "Paper's setting", "Paper (s)", "Our K", "Ours (s)"],
        align="llrrr",
        groups=[Group(name, [line(r) for r in records if r["setting"] == name]) for name in settings],
        data=pd.DataFrame(records),
    )
