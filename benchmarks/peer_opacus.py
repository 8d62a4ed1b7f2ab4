"""The round with Opacus: a loop over the clients, because Opacus trains one model and has no federation.

Opacus clips the per-example gradients of every client, adds noise and takes the client's step; the loop averages the
weights. Its single process may use all cores. Prints one JSON line.
"""

import itertools
import json
import statistics
import time
from importlib.metadata import version

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from private_round import CLIENTS, CLIP, LEARNING_RATE, ROUNDS, ROWS, accuracy, rows_of, start


def main() -> None:
    weights, noise = start()
    head = torch.nn.Linear(len(weights), weights.shape[1], bias=False)
    model = GradSampleModule(head)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), LEARNING_RATE),
        noise_multiplier=noise / CLIP,
        max_grad_norm=CLIP,
        expected_batch_size=ROWS,
    )
    clients = [rows_of(client) for client in range(CLIENTS)]
    ends = []
    for _ in range(ROUNDS):
        total = torch.zeros_like(weights)
        for x, y in clients:
            with torch.no_grad():
                head.weight.copy_(weights.T)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            total += head.weight.detach().T
        weights = total / CLIENTS
        ends.append(time.perf_counter())
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    report = {
        "name": f"Opacus {version('opacus')}, a loop over clients",
        "what": "per-example clipping",
        "ms_per_round": 1e3 * statistics.median(seconds),
        "accuracy": accuracy(weights),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
