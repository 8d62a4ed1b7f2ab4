"""`fedsweep bench`: how fast this machine sweeps, compared with slower ways to run the same trials.

All numbers of a report come from one run on one machine, so their ratios are meaningful. The benchmark fails if two
ways to compute the same trial give different results.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

from orchestrator.bench import kernel_speed, pack_speed, plain_tune, whole_search
from orchestrator.bench.clock import process_start
from orchestrator.bench.workload import PAPER_SIZED, Measurement, Workload, federation
from orchestrator.execution.cluster import nodes
from orchestrator.execution.cluster.connect import connected
from orchestrator.execution.packing import cluster_capacity
from orchestrator.study.settings.resources import ResourceSettings
from trainables.federation.federation_size import FederationSize
from trainables.lazy import torch
from trainables.models import kernels

CLIENTS = 20
PACKS = (
    pack_speed.lanes,
    pack_speed.saturated,
    pack_speed.centred,
    pack_speed.evaluation,
    pack_speed.one_at_a_time,
)
"""Measurements that share one federation."""


def bench(quick: bool, log: Callable[[str], None]) -> dict[str, Any]:
    began = process_start()
    with connected():
        size = cluster_capacity(nodes.node_resources(), ResourceSettings(), CLIENTS).size
        measurement, workload = Measurement(size, quick, log), Workload(PAPER_SIZED, CLIENTS)
        with federation(workload, size) as started:
            started.open(workload.trials(1))
            report: dict[str, Any] = {
                "startup_s": time.time() - began,
                "device": _device_name(size),
                "hosts": size.hosts,
                "kernel": kernels.chosen(size.device),
            }
            log(f"{report['device']}, {size.hosts} client host(s), kernel: {report['kernel']}")
            log(f"start-up to first round: {report['startup_s']:.1f} s")
            for measure in PACKS:
                report |= measure(measurement, workload, started)
        report |= kernel_speed.per_example(measurement, workload)
        report |= kernel_speed.noise(measurement)
        if size.device == "cuda" and not quick:
            report |= kernel_speed.wide(measurement)
        report |= pack_speed.growth(measurement)
        report |= whole_search.search(log)
        report |= plain_tune.naive(measurement, workload, report)
    return report


def _device_name(size: FederationSize) -> str:
    if size.device == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
