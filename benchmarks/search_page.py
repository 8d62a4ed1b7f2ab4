"""Writes the tables of docs/benchmark.md: python -m benchmarks.search_page [--collect FOLDER]

--collect takes the results of benchmarks/search_bars.py and search_time.py into benchmarks/reports first; strategies
that were not replayed, and machines on which the time was not measured, keep their rows."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from benchmarks import page, searches

REPORTS = searches.REPORT.parent
PAGE = page.DOCS / "benchmark.md"
STRATEGIES = ("grid", "surface", "random", "optuna", "halving")


def collect(folder: Path) -> None:
    live = [cell for file in sorted(folder.glob("live-*.json")) for cell in json.loads(file.read_text("utf-8"))]
    found: dict[str, Any] = {"live": live}
    if (file := folder / "frontier.json").exists():
        found["frontier"] = json.loads(file.read_text("utf-8"))
    if (file := folder / "time.json").exists():
        measured = json.loads(file.read_text("utf-8"))
        devices = {entry["device"] for entry in measured}
        found["time"] = [entry for entry in _times() if entry["device"] not in devices] + measured
    for name, content in found.items():
        if content:
            (REPORTS / f"search_{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if (folder / "replays.jsonl").exists():
        new, known = searches.collect(folder), pd.read_csv(searches.REPORT)
        replayed = pd.MultiIndex.from_frame(known[["table", "strategy"]]).isin(
            pd.MultiIndex.from_frame(new[["table", "strategy"]])
        )
        pd.concat([new, known[~replayed]]).to_csv(searches.REPORT, index=False)


def difference(cell: dict[str, Any]) -> tuple[float, float]:
    """Mean regret of `surface` minus that of `grid`, and its standard error."""
    if found := cell["strategies"]["surface"].get("against grid"):
        return found["mean"], found["error"]
    ours, theirs = (cell["strategies"][name]["losses"] for name in ("surface", "grid"))
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    return fmean(apart), stdev(apart) / math.sqrt(len(apart))


def live_lines(cells: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"| data, method, ε | best mean | {' | '.join(STRATEGIES)} | surface − grid |",
        "|---|---:|" + "---:|" * (len(STRATEGIES) + 1),
    ]
    for cell in cells:
        known = cell["strategies"]
        texts = [
            f"{own['mean']:.2f} / {own['p95']:.2f} ({own['trial_rounds'] / 1000:.1f}k)"
            for own in (known[name] for name in STRATEGIES)
        ]
        name = f"{cell['data']}, {cell['method']}, {cell['epsilon']:g}"
        apart, error = difference(cell)
        lines.append(f"| {name} | {cell['best']['mean']:.2f} | {' | '.join(texts)} | {apart:+.2f} ± {error:.2f} |")
    return lines


def frontier_lines(points: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| data, method | budgets | within 0.5 points or 2 s.e. | within the bands | mean difference | largest |",
        "|---|---|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["data"], point["method"], point["searched"]), []).append(point)
    for (data, method, searched), own in groups.items():
        apart = [point["predicted"] - point["confirmed"] for point in own]
        bands = [2 * math.hypot(point["deviation"], point["error"]) for point in own]
        inside = sum(abs(a) <= band for a, band in zip(apart, bands, strict=True))
        largest = max(own, key=lambda point: abs(point["predicted"] - point["confirmed"]))
        lines.append(
            f"| {data}, {method} | {'searched' if searched else 'not searched'} | "
            f"{sum(point['holds'] for point in own)} of {len(own)} | {inside} of {len(own)} | {fmean(apart):+.2f} | "
            f"{largest['predicted'] - largest['confirmed']:+.2f} at ε = {largest['epsilon']:g} |"
        )
    return lines


def _times() -> list[dict[str, Any]]:
    file = REPORTS / "search_time.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else []


def time_lines(entries: list[dict[str, Any]]) -> list[str]:
    lines = ["| machine | strategy | trials | seconds in rounds | share of the grid |", "|---|---|---:|---:|---:|"]
    grids = {entry["device"]: entry["rounds_s"] for entry in entries if entry["strategy"] == "grid"}
    for entry in sorted(entries, key=lambda entry: (entry["device"], entry["strategy"])):
        plural = "s" if entry["rounds"] != 1 else ""
        rounds = f" ({entry['rounds']} round{plural} per trial)" if entry["rounds"] else ""
        share = entry["rounds_s"] / grids.get(entry["device"], math.nan)
        lines.append(
            f"| {entry['device']}{rounds} | `{entry['strategy']}` | {entry['trials']:,} | {entry['rounds_s']:,.0f} | "
            f"{share:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", type=Path)
    options = parser.parse_args()
    if options.collect:
        collect(options.collect)
    page.write("live", live_lines(json.loads((REPORTS / "search_live.json").read_text("utf-8"))), PAGE)
    page.write("frontier", frontier_lines(json.loads((REPORTS / "search_frontier.json").read_text("utf-8"))), PAGE)
    page.write("time", time_lines(_times()), PAGE)
    searches.write_page()


if __name__ == "__main__":
    main()
