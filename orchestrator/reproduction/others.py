"""More tables of the DP-FedSOFIM paper: McNemar's test, the partition, seconds a round; and PathMNIST's stand-in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.mcnemar import SIGNIFICANCE, Comparison
from orchestrator.report.tables.render import Bold, Group, Table
from orchestrator.reproduction.entries import name_of
from orchestrator.reproduction.joining import FEDSOFIM, numbers
from orchestrator.reproduction.ours import Entry, Ours


def mcnemar(ours: Ours) -> dict[int, Table]:
    """Tables 15 and 16."""
    found = {}
    for number in dict.fromkeys(row.table for row in numbers("fedsofim-mcnemar")):
        records = [record for row in numbers("fedsofim-mcnemar") if row.table == number for record in _tests(ours, row)]
        if records:
            found[number] = _mcnemar_table(number, records)
    return found


def _tests(ours: Ours, row: Any) -> list[dict[str, Any]]:
    same = {"dataset": row.dataset, "backbone": row.backbone, "partition": "dirichlet:0.5", "epsilon": row.epsilon}
    found = []
    for entry in ours.of(**same, label=row.baseline, papers_way=True):
        sofim = ours.of(**same, study=entry.study, label=FEDSOFIM, strategy=entry.strategy)
        mine, theirs = _correct(sofim[0]) if sofim else None, _correct(entry)
        if mine is None or theirs is None:
            continue
        test = Comparison.of([(mine, theirs)], _rows(ours, entry))
        found.append(
            {
                **{"setting": entry.setting, "epsilon": row.epsilon, "baseline": row.baseline},
                **{"paper_n10": row.n10, "paper_n01": row.n01, "paper_p": row.p, "n10": test.n10, "n01": test.n01},
                **{"p": test.p, "paper_says": _says(row.n10, row.n01, float(str(row.p).lstrip("<")))},
                "we_say": _says(test.n10, test.n01, test.p),
            }
        )
    return found


def _mcnemar_table(number: int, records: Sequence[dict[str, Any]]) -> Table:
    def line(record: dict[str, Any]) -> list[str]:
        p = "<0.0001" if record["p"] < 0.0001 else f"{record['p']:.4f}"
        return [
            *(budget(record["epsilon"]), record["baseline"]),
            *(f"{record['paper_n10']} / {record['paper_n01']}", str(record["paper_p"])),
            *(f"{record['n10']} / {record['n01']}", p, record["we_say"]),
            "yes" if record["we_say"] == record["paper_says"] else Bold("no"),
        ]

    agree = sum(record["we_say"] == record["paper_says"] for record in records)
    settings = dict.fromkeys(record["setting"] for record in records)
    return Table(
        title=f"{name_of(FEDSOFIM, number)} beside ours: McNemar's test of {FEDSOFIM}",
        summary="Whether DP-FedSOFIM differs from each baseline by more than chance, there and here.",
        caption=(
            "n10: test rows that DP-FedSOFIM has right and the baseline wrong; n01: the reverse; one seed. Better or "
            f"worse means p < {SIGNIFICANCE}. {agree} of {len(records)} comparisons come out as in the paper."
        ),
        columns=["Budget", "Baseline", "Paper n10 / n01", "p", "Ours n10 / n01", "p", "DP-FedSOFIM is", "Agrees"],
        align="llrrrrll",
        groups=[Group(name, [line(r) for r in records if r["setting"] == name]) for name in settings],
        data=pd.DataFrame(records),
    )


def _says(n10: int, n01: int, p: float) -> str:
    return "no different" if p >= SIGNIFICANCE else "better" if n10 > n01 else "worse"


def _correct(entry: Entry) -> bytes | None:
    """Of the first seed, as the paper's test is of one seed."""
    row = entry.cell.confirm.get(entry.cell.seeds[0])
    return row.correct if row is not None and row.state == "done" and row.correct else None


def _rows(ours: Ours, entry: Entry) -> int | None:
    facts = next(results.facts for results in ours.results if results.study.name == entry.study)
    return facts.get(f"test_rows:{entry.setting}")


def partition(ours: Ours, table: int) -> Table | None:
    """Tables 13 and 14: whether our clients hold what the paper's hold."""
    theirs = [row for row in numbers("fedsofim-partition") if row.table == table]
    clients = 1 + max(row.client for row in theirs)
    for setting, counts in ours.partitions.items():
        dataset, *_, dealt = setting.split(" / ")
        if (dataset, dealt) != (theirs[0].dataset, theirs[0].partition) or len(counts) != clients:
            continue
        same = [counts[row.client][row.__dict__["class"]] == row.rows for row in theirs]
        lines = []
        for client in range(clients):
            mine = [(row, equal) for row, equal in zip(theirs, same, strict=True) if row.client == client]
            equal = "yes" if all(flag for _, flag in mine) else Bold("no")
            lines.append([str(client), str(sum(row.rows for row, _ in mine)), str(sum(counts[client])), equal])
        data = [{**row.__dict__, "ours": counts[row.client][row.__dict__["class"]]} for row in theirs]
        return Table(
            title=f"{name_of(FEDSOFIM, table)} beside ours: {setting}",
            summary="How many rows of which class every client holds, there and here.",
            caption=f"{sum(same)} of the {len(same)} counts (client by class) are the same.",
            columns=["Client", "Paper's rows", "Our rows", "All classes the same"],
            align="rrrl",
            groups=[Group("", lines)],
            data=pd.DataFrame(data),
        )
    return None


def runtime(ours: Ours) -> Table | None:
    """Table 7. Ours is a trial's share of its pack."""
    groups, records = [], []
    for dataset, backbone in (
        ("CIFAR-10", "ResNet-20"),
        ("CIFAR-10", "VGG-16"),
        ("PathMNIST", "ResNet-20"),
        ("PathMNIST", "VGG-16"),
    ):
        setting = f"{dataset} / {backbone} / dirichlet:0.5"
        column = f"{dataset}_{backbone}_s".lower().replace("-", "")
        lines = []
        for row in numbers("fedsofim-runtime"):
            mine = [e for e in ours.of(setting=setting, label=row.method, papers_way=True) if _is_timed(e, row.setting)]
            seconds = [r.seconds / r.rounds for entry in mine for r in entry.cell.confirm.values() if r.rounds]
            if seconds:
                theirs, average = getattr(row, column), sum(seconds) / len(seconds)
                steps = ", ".join(dict.fromkeys(str((e.cell.search.chosen or {}).get("local_steps", 1)) for e in mine))
                lines.append([row.method, str(row.setting) or "all", f"{theirs:.2f}", steps, f"{average:.2g}"])
                record = {
                    "setting": setting,
                    "method": row.method,
                    "at": row.setting,
                    "paper_s": theirs,
                    "our_local_steps": steps,
                    "ours_s": average,
                }
                records.append(record)
        if lines:
            groups.append(Group(setting, lines))
    if not groups:
        return None
    return Table(
        title=f"{name_of(FEDSOFIM, 7)} beside ours: seconds a round",
        summary="How long a round takes, there and here.",
        caption=(
            "The paper trains one run at a time; here trials run side by side, and a trial's seconds are its share of "
            "what they took together: that is why they are so few. Averaged over the budgets that the paper's row is "
            "for, with the local steps K that our search chose there. Both depend on the machine."
        ),
        columns=["Method", "Paper's setting", "Paper (s)", "Our K", "Ours (s)"],
        align="llrrr",
        groups=groups,
        data=pd.DataFrame(records),
    )


def _is_timed(entry: Entry, stated: str) -> bool:
    """Whether a row of table 7 is about this budget: `eps 0.5, K = 1`, `eps >= 1, K = 5`, or nothing for all."""
    least = re.match(r"eps (>= )?([\d.]+)", stated)
    if least is None:
        return True
    return entry.epsilon >= float(least[2]) if least[1] else entry.epsilon == float(least[2])


def order(ours: Ours) -> Table | None:
    """PathMNIST's stand-in: the numbers are of other pictures, so only the order of the methods is compared."""
    theirs = [row for row in numbers("fedsofim-accuracy") if row.table == 4 and row.round == 70]
    entries = [entry for entry in ours.of(dataset="CRC-5") if entry.plain and entry.mean() is not None]
    groups, records = [], []
    for study, setting, strategy in dict.fromkeys((entry.study, entry.setting, entry.strategy) for entry in entries):
        lines = []
        for epsilon in dict.fromkeys(entry.epsilon for entry in entries):
            paper = pd.Series({row.method: row.mean for row in theirs if row.epsilon == epsilon})
            same = [
                e for e in entries if (e.study, e.setting, e.strategy, e.epsilon) == (study, setting, strategy, epsilon)
            ]
            mine = pd.Series({entry.method: entry.mean() for entry in same})
            both = pd.concat([paper, mine], axis=1, keys=["paper", "ours"]).dropna()
            if len(both) < 3:
                continue
            rank = float(both["paper"].rank().corr(both["ours"].rank()))
            first = str(both["paper"].idxmax()), str(both["ours"].idxmax())
            lines.append([budget(epsilon), *first, f"{rank:+.2f}", str(len(both))])
            record = {
                "study": study,
                "setting": setting,
                "epsilon": epsilon,
                "paper_best": first[0],
                "our_best": first[1],
            }
            records.append({**record, "rank_correlation": rank, "methods": len(both)})
        if lines:
            groups.append(Group(f"{setting} ({study})", lines))
    if not groups:
        return None
    return Table(
        title="In place of table 4 of the DP-FedSOFIM paper: the order of methods on CRC-5",
        summary="PathMNIST's stand-in: whether methods come in the same order.",
        caption=(
            "CRC-5 is not PathMNIST (the findings say what it is): numbers cannot be compared, so the order of the "
            "methods after the last round is (Spearman's rank correlation, 1: the same order)."
        ),
        columns=["Budget", "Paper's best", "Our best", "Rank correlation", "Methods"],
        align="lllrr",
        groups=groups,
        data=pd.DataFrame(records),
    )
