"""Time of one round's gradients of a linear head, for narrow and wide features, plain and centred, alone and in packs,
with automatic clipping and in lower precision.

    python -m benchmarks.heads OUT.json [--device cuda]
    python -m benchmarks.heads --page    write docs/performance.md from benchmarks/reports/heads-*.json

Runs in one process without Ray, on a CPU with one thread. The share of the GEMM rate is the time of the two matrix
products of the same shapes in torch, divided by the time of the whole computation.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import page
from trainables.choices import PRECISIONS, Precision
from trainables.models import centring
from trainables.models.centres import Centres
from trainables.models.lanes import SHAPES
from trainables.models.shard import Shard
from trainables.models.softmax import SoftmaxHead

SHAPES_MEASURED = ((64, 10), (1280, 10), (768, 100))
ROWS = 45_000
CLIENTS, CENTRES = 20, 20
LANES = {"cpu": 16, "cuda": 256}
PACKS = {"cpu": (8, 32, 128), "cuda": (8, 32, 128, 2048)}
VARIANTS = ("automatic", "tf32", "bf16")
REPORTS = {"heads-2-cores-x86": "one x86 core, 16 lanes", "heads-h200": "H200, 256 lanes"}
"""Reports in the order of the page, with the machine and the number of lanes."""
MEASURES_VARIANTS = REPORTS["heads-h200"]
"""Of the reports. A CPU emulates lower precision."""


def seconds_of(calls: Mapping[str, Callable[[], object]], device: str, repetitions: int) -> dict[str, float]:
    """The shortest time of each call. The calls take turns, because the speed of a machine changes. On a CPU it is
    processor time, because other programs may run there."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    shortest: dict[str, float] = {}
    for repetition in range(repetitions + 1):  # the first is a warm-up
        for name, call in calls.items():
            began = clock()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if repetition:
                shortest[name] = min(shortest.get(name, math.inf), clock() - began)
    return shortest


def gradient(
    head: SoftmaxHead, shard: Shard, theta: torch.Tensor, clip: torch.Tensor, automatic: bool = False
) -> Callable[[], object]:
    return lambda: centring.clipped_gradient_sum(head, shard, theta, clip, automatic=automatic)


def shard_of(features: int, classes: int, device: str, precision: Precision = "float32") -> Shard:
    rng = np.random.default_rng(0)
    rows = ROWS // CLIENTS
    parts = [
        (rng.standard_normal((rows, features), dtype=np.float32), rng.integers(0, classes, rows))
        for _ in range(CLIENTS)
    ]
    return Shard.build(parts, device, precision=precision)


def of_lanes(head: SoftmaxHead, lanes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    theta = 0.01 * torch.randn(lanes, head.dimension, generator=torch.Generator().manual_seed(0))
    return theta.to(device), torch.full((lanes,), 1.0, device=device)


def products_alone(features: int, classes: int, device: str) -> tuple[Callable[[], None], float]:
    """A function that computes x W and x^T R for some rows and lanes, and how many rounds of one lane that is."""
    block = SHAPES[device].lanes
    rows = ROWS if device == "cuda" else SHAPES[device].rows(classes)
    x = torch.randn(rows, features, device=device)
    w, r = torch.randn(features, classes * block, device=device), torch.randn(rows, classes * block, device=device)
    out, back = torch.empty_like(r), torch.empty_like(w)

    def both() -> None:
        torch.mm(x, w, out=out)
        torch.mm(x.T, r, out=back)

    return both, rows * block / ROWS


def measure(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for features, classes in SHAPES_MEASURED:
        head, lanes = SoftmaxHead(features, classes), LANES[device]
        shard, (theta, clip) = shard_of(features, classes, device), of_lanes(head, lanes, device)
        means = 0.1 * np.random.default_rng(1).standard_normal((CENTRES, features)).astype(np.float32)
        centred = shard.with_centres(Centres.of(means[np.arange(lanes) % CENTRES], device))
        products, share = products_alone(features, classes, device)
        calls = {
            "plain": gradient(head, shard, theta, clip),
            "centred": gradient(head, centred, theta, clip),
            "products": products,
        }
        seconds = seconds_of(calls, device, 5)
        found[f"{features} x {classes}"] = {
            "us_per_lane": 1e6 * seconds["plain"] / lanes,
            "gemm_share": seconds["products"] / share * lanes / seconds["plain"],
            "centred_ratio": seconds["centred"] / seconds["plain"],
        }
        print(features, classes, found[f"{features} x {classes}"], flush=True)
    head, shard = SoftmaxHead(64, 10), shard_of(64, 10, device)
    given = of_lanes(head, LANES[device], device)
    variants = {"automatic": gradient(head, shard, *given, automatic=True)}
    for precision in PRECISIONS:
        variants[precision] = gradient(head, shard_of(64, 10, device, precision), *given)
    seconds = seconds_of(variants, device, 5)
    for name in VARIANTS:
        found[f"64 x 10, {name}"] = {"ratio_to_plain_float32": seconds[name] / seconds["float32"]}
        print(64, 10, name, found[f"64 x 10, {name}"], flush=True)
    packs = {f"{lanes} lanes": gradient(head, shard, *of_lanes(head, lanes, device)) for lanes in PACKS[device]}
    for (name, shortest), lanes in zip(seconds_of(packs, device, 3).items(), PACKS[device], strict=True):
        found[name] = {"us_per_lane": 1e6 * shortest / lanes}
        print(name, found[name], flush=True)
    return found


def table(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A Markdown table, shapes by machines: share of the GEMM rate, and centred relative to plain."""
    names = [f"{title}: share of the GEMM rate | {title}: centred relative to plain" for title in reports]
    lines = [f"| features x classes | {' | '.join(names)} |", "|---|" + "---:|---:|" * len(reports)]
    for features, classes in SHAPES_MEASURED:
        found = [report[f"{features} x {classes}"] for report in reports.values()]
        cells = [f"{own['gemm_share']:.2f} | {own['centred_ratio']:.2f}" for own in found]
        lines.append(f"| {features:,} x {classes} | {' | '.join(cells)} |")
    return lines


def variants_table(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Automatic clipping and lower precision relative to plain clipping in float32."""
    lines = [f"| 64 x 10, relative to float32 | {' | '.join(reports)} |", "|---|" + "---:|" * len(reports)]
    for name in VARIANTS:
        found = [report[f"64 x 10, {name}"]["ratio_to_plain_float32"] for report in reports.values()]
        lines.append(f"| {name}{' clipping' * (name == 'automatic')} | {' | '.join(f'{r:.2f}' for r in found)} |")
    return lines


def kept_reports() -> dict[str, Mapping[str, Any]]:
    folder = Path(__file__).resolve().parent / "reports"
    return {title: json.loads((folder / f"{name}.json").read_text())["rows"] for name, title in REPORTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    if options.out is None and not options.page:
        parser.error("name the file to write, or --page")
    if options.page:
        reports = kept_reports()
        page.write("heads", [*table(reports), "", *variants_table({MEASURES_VARIANTS: reports[MEASURES_VARIANTS]})])
        return
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    with torch.inference_mode():
        found = measure(options.device)
    options.out.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
