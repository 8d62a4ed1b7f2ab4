"""Sets reports of `fedsweep bench --json` side by side in docs/performance.md: benchmarks/table.py NAME=FILE ..."""

import json
import sys
from pathlib import Path

from benchmarks import page


def rows(reports: list[dict]) -> list[tuple[str, list[str]]]:
    def of(key: str, form: str, scale: float = 1.0) -> list[str]:
        return [format(report[key] * scale, form) if key in report else "" for report in reports]

    lanes = sorted({int(count) for report in reports for count in report["lanes"]})
    grown = [key for key in reports[0]["growth_ms_per_trial_round"] if key != "clients=20"]

    def at(report: dict, count: int) -> str:
        found = report["lanes"].get(str(count))
        return f"{found['ms_per_trial_round']:.3g} ({100 * found['gemm_fraction']:.0f}%)" if found else ""

    def wide(report: dict, precision: str) -> str:
        found = report.get("wide", {}).get(precision)
        return f"{found['ms_per_trial_round']:.3g} ({100 * found['gemm_fraction']:.0f}%)" if found else ""

    return [
        ("matrix products alone, GFLOP/s", of("gemm_gflops", ",.0f")),
        *(
            (
                f"ms a trial-round, {count} lane{'s' if count > 1 else ''} (share of that rate)",
                [at(r, count) for r in reports],
            )
            for count in lanes
        ),
        ("saturated lanes against calm ones, time", of("saturated_ratio", ".2f")),
        ("evaluation every 10 rounds, % of a run", of("evaluation_share", ".1f", 100)),
        ("messages to and from a host in a round", of("messages_per_round_and_host", "g")),
        ("32 in a pack against one at a time", of("packed_speedup", ".1f")),
        ("closed form against per-example gradients in memory", of("per_example_speedup", ".1f")),
        *(
            (f"ms a trial-round in 32 lanes, {key}", [f"{r['growth_ms_per_trial_round'][key]:.3g}" for r in reports])
            for key in grown
        ),
        ("noise of a client in a round (650 numbers), us", of("noise_us_per_client", ".2f")),
        *(
            (
                f"ms a trial-round of ImageNet's shape in {precision} (share of its products' rate)",
                [wide(report, precision) for report in reports],
            )
            for precision in ("float32", "tf32", "bf16")
        ),
        ("start-up to first round, s", of("startup_s", ".1f")),
        ("DP-FedSOFIM's search (coarse, fine, confirm), study to tables, s", of("search_s", ".1f")),
        ("the orchestrator's overhead on the rounds, %", of("overhead_fraction", ".1f", 100)),
        ("the same per trial, ms", of("overhead_ms_per_trial", ".1f")),
        ("peak memory of all processes in it, GiB", of("peak_memory_bytes", ".2f", 1 / 2**30)),
        ("a naive Ray Tune trial with 20 actors of its own, s", of("naive_s_per_trial", ".1f")),
        ("the search against all its trials so (extrapolated from 2)", of("naive_speedup", ".0f")),
    ]


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    reports = [json.loads(Path(file).read_text(encoding="utf-8")) for file in given.values()]
    table = [
        f"| | {' | '.join(given)} |",
        "|---|" + "---:|" * len(given),
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows(reports)),
    ]
    page.write("bench", table)


if __name__ == "__main__":
    main()
