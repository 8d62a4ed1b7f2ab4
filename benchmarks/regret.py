"""The regret of search strategies (see orchestrator/bench/regret.py): `python -m benchmarks.regret --data FILE ...`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from orchestrator.bench.regret import RegretOptions, regrets, table

REPORT = Path(__file__).resolve().parent / "reports" / "regret.json"
DOCUMENTED = ("grid", "grid single", "grid warm", "random", "optuna", "halving")  # columns of docs/search.md


def main(arguments: Sequence[str] | None = None) -> None:
    default = RegretOptions()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", nargs="+", type=Path, help="only write reports of --json into docs/search.md")
    parser.add_argument("--json", type=Path, help="write all numbers to this file, cell by cell")
    add = parser.add_argument
    add("--data", default=default.data, help="feature file or built-in data set")
    add("--methods", nargs="+", default=default.methods)
    add("--epsilons", nargs="+", type=float, default=default.epsilons)
    add("--strategies", nargs="+", default=default.strategies, help="grid, optuna, random, halving")
    add("--warm-start", action="store_true", help="repeat with the winners of the other budgets in the contest")
    add("--select", nargs="+", default=default.select)
    add("--refine", default=default.refine)
    add("--space", type=json.loads, default=default.space, help="JSON: fixed, coarse, fine of every method")
    add("--repetitions", type=int, default=default.repetitions)
    add("--seconds", type=float, help="start no further repetition of a method after this time")
    add("--search-seeds", type=int, default=default.search_seeds)
    add("--contest-seeds", type=int, default=default.contest_seeds)
    add("--evaluation-seeds", type=int, default=default.evaluation_seeds)
    add("--partition", default=default.partition)
    add("--clients", type=int, default=default.clients)
    add("--device", choices=["cpu", "cuda"], default=default.device)
    values = vars(parser.parse_args(arguments))
    collect, report = values.pop("collect"), values.pop("json")
    if collect:
        collected = [cell for file in collect for cell in json.loads(file.read_text(encoding="utf-8"))]
        REPORT.write_text(json.dumps(collected, indent=1) + "\n", encoding="utf-8")
        page.write("regret", table(collected, DOCUMENTED), page.DOCS / "search.md")
        return
    options = RegretOptions(**values)
    cells: list[dict[str, Any]] = []
    for method in options.methods:
        cells += regrets(options, method)
        if report:
            report.write_text(json.dumps(cells, indent=1), encoding="utf-8")
    print("\n".join(table(cells)))


if __name__ == "__main__":
    main()
