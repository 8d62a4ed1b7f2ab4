"""The speed of kernels without a federation: matrix products, gradients and noise."""

from __future__ import annotations

import time
from typing import Any

import ray

from orchestrator.bench.workload import DisagreementError, Measurement, Workload, best_seconds
from trainables.choices import PRECISIONS, Precision
from trainables.federation.federation_size import FederationSize
from trainables.lazy import torch
from trainables.models import kernels
from trainables.models import lanes as lane_shapes
from trainables.models.products import Products
from trainables.models.shard import Shard, pitch
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.noise import Address


def gemm_rate(size: FederationSize) -> float:
    """Floating-point operations per second of the kernel's two matrix products: on the GPU, or summed over as many
    cores as there are client hosts, all busy at the same time."""

    def measure(device: str) -> float:
        torch.set_num_threads(1)
        shape = lane_shapes.SHAPES[device]
        rows = shape.rows(10)
        x, w = torch.rand(rows, 65, device=device), torch.rand(65, 10 * shape.lanes, device=device)
        z, g = torch.mm(x, w), torch.zeros(65, 10 * shape.lanes, device=device)
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < 1.0:
            for _ in range(10):
                torch.mm(x, w, out=z)
                g.addmm_(x.t(), z)
            if device == "cuda":
                torch.cuda.synchronize()
            count += 10
        return count * 4.0 * x.numel() * w.shape[1] / (time.perf_counter() - start)

    if size.device == "cuda":
        return measure("cuda") if torch.cuda.is_available() else float("nan")
    task = ray.remote(num_cpus=0)(measure)
    ray.get([task.remote("cpu") for _ in range(size.hosts)])  # warm-up: start processes, import torch
    return sum(ray.get([task.remote("cpu") for _ in range(size.hosts)]))


def per_example(measurement: Measurement, workload: Workload) -> dict[str, Any]:
    """One round of all clients in one process: sums of clipped gradients in closed form, compared with sums over
    per-example gradients in memory."""
    device, data, clip, lanes = measurement.size.device, workload.problem.data, 10.0, 32
    head = SoftmaxHead(data.features, data.classes)
    theta = head.initial(42).to(device)
    shards = [
        Shard.build([(data.x_train[rows], data.y_train[rows])], device) for rows in workload.problem.partition.rows
    ]
    labels = torch.eye(head.classes, device=device)
    many, bounds = theta.expand(lanes, -1), torch.full((lanes,), clip, device=device)

    def plain(shard: Shard) -> torch.Tensor:
        x, y = shard.x[0], labels[shard.y[0]]
        residual = torch.softmax(x @ theta.view(head.rows, head.classes), 1) - y
        gradients = x.unsqueeze(2) * residual.unsqueeze(1)
        norms = gradients.flatten(1).norm(dim=1)
        return (gradients * (clip / norms).clamp(max=1).view(-1, 1, 1)).sum(0).flatten()

    def closed(shard: Shard) -> torch.Tensor:
        return head.clipped_gradient_sum(shard, many, bounds)[0][0, 0]

    if not all(torch.allclose(plain(s).double(), closed(s).double(), rtol=1e-3, atol=1e-2) for s in shards):
        raise DisagreementError("per-example gradients and the closed form give different sums")
    seconds = best_seconds(lambda: [plain(shard) for shard in shards], device)
    speedup = seconds / best_seconds(lambda: [closed(shard) for shard in shards], device) * lanes
    measurement.log(f"the closed form in {lanes} lanes is {speedup:.1f}x as fast as per-example gradients in memory")
    return {"per_example_ms": 1e3 * seconds, "per_example_speedup": speedup}


def noise(measurement: Measurement) -> dict[str, Any]:
    """Time to draw the noise of one client in one round."""
    device, clients, size = measurement.size.device, 2000, 650

    def draw() -> None:
        if kernels.chosen(device) == "triton":
            from trainables.privacy import noise_triton

            numbers, seeds = torch.arange(clients, device=device), torch.tensor([42], device=device)
            noise_triton.normals(numbers, seeds, 1, 0, "gradient", size)
        else:
            for client in range(clients):
                Address(42, client, 1, 0, "gradient").normal(size)

    per_client = 1e6 * best_seconds(draw, device, 3) / clients
    measurement.log(f"noise of one client in one round ({size} numbers): {per_client:.2f} us")
    return {"noise_us_per_client": per_client}


def wide(measurement: Measurement) -> dict[str, Any]:
    """The gradients of a round on features of ImageNet's shape, in one block of lanes."""
    rounds = {precision: _wide_round(precision) for precision in PRECISIONS}
    for precision, measured in rounds.items():
        measurement.log(
            f"1.28 M rows x 1,024 features, 1,000 classes, {precision}: {measured['ms_per_trial_round']:.1f} ms per "
            f"trial-round, {measured['gemm_fraction']:.2f} of the rate of its matrix products"
        )
    return {"wide": rounds}


def _wide_round(precision: Precision) -> dict[str, float]:
    """Time per trial-round, and the fraction of it that the matrix products alone would take."""
    clients, rows, features, classes = 20, 64_000, 1024, 1000
    head, shape = SoftmaxHead(features, classes), lane_shapes.SHAPES["cuda"]
    products = Products(precision)
    padded_rows = torch.randn(clients, rows, pitch(head.rows, "cuda"), device="cuda").div_(32)
    padded_rows[..., features] = 1
    x = products.rounded(padded_rows)[..., : head.rows]
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=torch.float32)
    labels = torch.randint(0, classes, (clients, rows), device="cuda")
    shard = Shard(x, norm, labels, torch.full((clients, 1, 1), float(rows), device="cuda"), precision)
    theta = 0.01 * torch.randn(shape.lanes, head.dimension, device="cuda")
    clip = torch.full((shape.lanes,), 10.0, device="cuda")
    whole = best_seconds(lambda: head.clipped_gradient_sum(shard, theta, clip), "cuda", 2)
    _, step = shape.chunk(classes, clients)
    chunk, columns = shard.padded[:1, :step], classes * shape.lanes
    right = products.rounded(torch.randn(1, chunk.shape[2], columns, device="cuda"))
    left = products.rounded(torch.randn(1, step, columns, device="cuda"))
    block = best_seconds(lambda: (products.of(chunk, right), products.of(chunk.mT, left)), "cuda", 5)
    alone = block * clients * rows / step
    return {"ms_per_trial_round": 1e3 * whole / shape.lanes, "gemm_fraction": alone / whole}
