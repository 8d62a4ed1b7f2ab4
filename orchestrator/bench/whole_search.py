"""A whole search, from the study to the tables: its time, its overhead and its memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.bench.clock import FIRST_ROUND, Clock
from orchestrator.bench.peak_memory import PeakMemory
from orchestrator.execution import study_run
from orchestrator.results.ledger import Ledger
from orchestrator.study.reading import parse

SEARCH = """
name: bench
data: [synthetic-frozen]
partitions: [iid]
methods: [dp-fedsofim]
epsilons: [10]
defaults: paper
seeds: {search: 42, confirm: [42, 123, 7]}
search: {select: single, refine: table}
"""


def search(log: Callable[[str], None]) -> dict[str, Any]:
    """A coarse and fine search of DP-FedSOFIM on data of the paper's size, from the study to the tables."""
    start, clock = time.time(), Clock()
    with tempfile.TemporaryDirectory(prefix="fedsweep-bench-") as folder:
        results = Path(folder) / "results"
        with PeakMemory() as memory:
            study_run.run(parse(SEARCH, "bench", Path(folder)), SEARCH, results, clock)
        end = time.time()
        with Ledger.read(results) as ledger:
            stages = ledger.stages()
    searched = {key for (_, _, stage), keys in stages.items() if stage != "confirm" for key in keys}
    everything = {key for keys in stages.values() for key in keys}
    # time outside rounds (scheduling, ledger, tables) from the first round to the last table, summed over federations
    overhead = clock.federations * (end - clock.began - clock.marks[FIRST_ROUND]) - clock.computing_s
    log(
        f"search of DP-FedSOFIM ({len(searched)} trials and the confirm runs), study to tables: {end - start:.1f} s, "
        f"of which {clock.computing_s:.1f} s in rounds"
    )
    log(f"overhead of the orchestrator relative to the rounds: {100 * overhead / clock.computing_s:.1f}%")
    log(f"peak memory of all its processes: {memory.peak / 2**30:.2f} GiB")
    return {
        "search_s": end - start,
        "search_trials": len(searched),
        "overhead_fraction": overhead / clock.computing_s,
        "overhead_ms_per_trial": 1e3 * overhead / len(everything),
        "peak_memory_bytes": memory.peak,
    }
