"""Rows per client and class: tables 13 and 14 of the DP-FedSOFIM paper."""

import pandas as pd

from orchestrator.report.tables.render import Bold, Group, Table
from orchestrator.reproduction.our_results import OurResults
from orchestrator.reproduction.paper_tables import FEDSOFIM, published, table_name


def partition_table(results: OurResults, number: int) -> Table | None:
    rows = [row for row in published("fedsofim-partition") if row.table == number]
    clients = 1 + max(row.client for row in rows)
    for setting, counts in (results.partitions or {}).items():
        dataset, *_, partition = setting.split(" / ")
        if (dataset, partition) != (rows[0].dataset, rows[0].partition) or len(counts) != clients:
            continue
        data = pd.DataFrame([{**vars(row), "ours": counts[row.client][row.label]} for row in rows])
        same = data["rows"] == data["ours"]
        lines = []
        for client, counts_of_client in data.groupby("client"):
            equal = "yes" if same[counts_of_client.index].all() else Bold("no")
            lines.append([str(client), str(counts_of_client["rows"].sum()), str(sum(counts[int(str(client))])), equal])
        text = f"{same.sum()} of {len(same)} counts (client by class) are equal."
        return Table(
            title=f"{table_name(FEDSOFIM, number)} and our results: {setting}",
            summary=f"{table_name(FEDSOFIM, number)} (the partition): {text}",
            caption=text,
            columns=["Client", "Paper's rows", "Our rows", "All classes equal"],
            align="rrrl",
            groups=[Group("", lines)],
            data=data,
        )
    return None
