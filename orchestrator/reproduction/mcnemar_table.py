"""McNemar's tests of DP-FedSOFIM against each baseline: tables 15 and 16 of its paper."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.mcnemar import SIGNIFICANCE, Comparison
from orchestrator.report.tables.render import Bold, Group, Table
from orchestrator.reproduction.our_results import OurResults
from orchestrator.reproduction.paper_tables import FEDSOFIM, published, table_name


def mcnemar_table(results: OurResults, number: int) -> Table | None:
    rows = [row for row in published("fedsofim-mcnemar") if row.table == number]
    records = [record for row in rows for record in _tests(results, row)]
    return build_table(number, records) if records else None


def _tests(results: OurResults, row: Any) -> Iterator[dict[str, Any]]:
    regime = {"dataset": row.dataset, "backbone": row.backbone, "partition": "dirichlet:0.5", "epsilon": row.epsilon}
    for baseline in results.select(**regime, label=row.baseline, paper_search=True):
        for ours in results.select(**regime, study=baseline.study, label=FEDSOFIM, strategy=baseline.strategy)[:1]:
            if ours.first_seed_correct is None or baseline.first_seed_correct is None:
                continue
            test = Comparison.of([(ours.first_seed_correct, baseline.first_seed_correct)], baseline.test_rows)
            yield {
                **{"setting": baseline.setting, "epsilon": row.epsilon, "baseline": row.baseline},
                **{"paper_n10": row.n10, "paper_n01": row.n01, "paper_p": row.p},
                **{"n10": test.n10, "n01": test.n01, "p": test.p},
                "paper_verdict": _verdict(row.n10, row.n01, float(str(row.p).lstrip("<"))),
                "our_verdict": _verdict(test.n10, test.n01, test.p),
            }


def _verdict(n10: int, n01: int, p: float) -> str:
    return "no different" if p >= SIGNIFICANCE else "better" if n10 > n01 else "worse"


def build_table(number: int, records: Sequence[dict[str, Any]]) -> Table:
    def line(record: dict[str, Any]) -> list[str]:
        return [
            *(budget(record["epsilon"]), record["baseline"]),
            *(f"{record['paper_n10']} / {record['paper_n01']}", str(record["paper_p"])),
            f"{record['n10']} / {record['n01']}",
            "<0.0001" if record["p"] < 0.0001 else f"{record['p']:.4f}",
            record["our_verdict"],
            "yes" if record["our_verdict"] == record["paper_verdict"] else Bold("no"),
        ]

    agree = sum(record["our_verdict"] == record["paper_verdict"] for record in records)
    settings = dict.fromkeys(record["setting"] for record in records)
    return Table(
        title=f"{table_name(FEDSOFIM, number)} and our results: McNemar's test of {FEDSOFIM}",
        summary=f"{table_name(FEDSOFIM, number)} (McNemar's test): {agree} of {len(records)} verdicts agree.",
        caption=(
            "n10: test rows that DP-FedSOFIM classifies correctly and the baseline does not; n01: the reverse; one "
            f"seed. Better or worse: p < {SIGNIFICANCE}. {agree} of {len(records)} verdicts agree with the paper's."
        ),
        columns=["Budget", "Baseline", "Paper n10 / n01", "p", "Ours n10 / n01", "p", "DP-FedSOFIM is", "Agrees"],
        align="llrrrrll",
        groups=[Group(name, [line(r) for r in records if r["setting"] == name]) for name in settings],
        data=pd.DataFrame(records),
    )
