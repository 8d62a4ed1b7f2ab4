"""Write `fedsweep bench --json` reports into docs/performance.md: `python -m benchmarks.table NAME=FILE ...`."""

import json
import sys
from pathlib import Path

from benchmarks import page


def rows(reports: list[dict]) -> list[tuple[str, list[str]]]:
    """Title and cells of every line, with one cell per report."""

    def of(key: str, form: str, scale: float = 1.0) -> list[str]:
        return [format(report[key] * scale, form) if key in report else "" for report in reports]

    lanes = sorted({int(count) for report in reports for count in report["lanes"]})
    grown = [key for key in reports[0]["growth_ms_per_trial_round"] if key != "clients=20"]

    def at(report: dict, count: int) -> str:
        return _time(report["lanes"].get(str(count)))

    def wide(report: dict, precision: str) -> str:
        return _time(report.get("wide", {}).get(precision))

    return [
        ("pure matrix products, GFLOP/s", of("gemm_gflops", ",.0f")),
        *(
            (
                f"ms per trial-round, {count} lane{'s' if count > 1 else ''} (share of that rate)",
                [at(r, count) for r in reports],
            )
            for count in lanes
        ),
        ("time of saturated lanes relative to regular ones", of("saturated_ratio", ".2f")),
        ("time of centred lanes with 20 centres relative to plain ones", of("centred_ratio", ".2f")),
        ("evaluation every 10 rounds, % of a run", of("evaluation_share", ".1f", 100)),
        ("speed-up of a pack of 32 over one trial at a time", of("packed_speedup", ".1f")),
        ("speed-up of the closed form over per-example gradients in memory", of("per_example_speedup", ".1f")),
        *(
            (f"ms per trial-round in 32 lanes, {key}", [f"{r['growth_ms_per_trial_round'][key]:.3g}" for r in reports])
            for key in grown
        ),
        ("noise of one client in one round (650 numbers), us", of("noise_us_per_client", ".2f")),
        *(
            (
                f"ms per trial-round, ImageNet's shape, {precision} (share of the rate of its products)",
                [wide(report, precision) for report in reports],
            )
            for precision in ("float32", "tf32", "bf16")
        ),
        ("start-up to first round, s", of("startup_s", ".1f")),
        ("search of DP-FedSOFIM (coarse, fine, confirm), study to tables, s", of("search_s", ".1f")),
        ("overhead of the orchestrator relative to the rounds, %", of("overhead_fraction", ".1f", 100)),
        ("overhead per trial, ms", of("overhead_ms_per_trial", ".1f")),
        ("peak memory of all processes of the search, GiB", of("peak_memory_bytes", ".2f", 1 / 2**30)),
        ("plain Ray Tune trial with 20 actors, s", of("naive_s_per_trial", ".1f")),
        ("speed-up of the search over plain Ray Tune (extrapolated from 2 trials)", of("naive_speedup", ".0f")),
    ]


def _time(measured: dict | None) -> str:
    return f"{measured['ms_per_trial_round']:.3g} ({100 * measured['gemm_fraction']:.0f}%)" if measured else ""


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
