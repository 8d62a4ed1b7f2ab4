"""A Flower app to be audited: clients send noisy gradient steps (`pip install "flwr[simulation]"`).

    fedsweep audit --program "python examples/audit/flower_program.py" --epsilon 2

Noise is added for secure aggregation: the mean over all clients has the claimed eps. `--fault` plants a mistake that
the audit catches."""

import argparse
import math
import os
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

CLIENTS, CLIP, ROUNDS, LEARNING_RATE = 4, 1.0, 6, 0.5
MU = 0.50162  # of eps = 2 at delta = 1e-5
FAULTS = ("none", "divisor", "steps", "clip-after-mean")
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content["arrays"].to_numpy_ndarrays()[0]
    x, y = rows_of(int(context.node_config["partition-id"]))
    weights = weights - LEARNING_RATE * private_gradient(weights, x, y, os.environ["FAULT"])
    reply = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(reply), reply_to=message)


def rows_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    with np.load(os.environ["FEATURES"]) as data:
        x, y = data["x_train"].astype(np.float64), data["y_train"]
    return x[client::CLIENTS], y[client::CLIENTS]


def private_gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray, fault: str) -> np.ndarray:
    """Replace-one adjacency: one record moves the sum of clipped gradients by 2 CLIP. The clients' noise adds up."""
    std = 2 * CLIP * math.sqrt(ROUNDS / CLIENTS) / MU
    std *= math.sqrt(1 / 8) if fault == "steps" else 1 / len(y) if fault == "divisor" else 1
    logits = x @ weights
    p = np.exp(logits - logits.max(1, keepdims=True))
    errors = p / p.sum(1, keepdims=True) - np.eye(weights.shape[1])[y]
    if fault == "clip-after-mean":
        mean = x.T @ errors / len(y)
        mean *= min(1.0, CLIP / np.linalg.norm(mean))
    else:
        lengths = np.maximum(np.linalg.norm(x, axis=1) * np.linalg.norm(errors, axis=1), 1e-12)
        mean = x.T @ (errors * np.minimum(1, CLIP / lengths)[:, None]) / len(y)
    return mean + std / len(y) * np.random.default_rng().standard_normal(weights.shape)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    with np.load(os.environ["FEATURES"]) as data:
        start = np.zeros((data["x_train"].shape[1], int(data["y_train"].max()) + 1))
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    result = strategy.start(grid, ArrayRecord([start]), ROUNDS)
    np.save(Path(os.environ["AUDIT_OUT"]) / "weights.npy", result.arrays.to_numpy_ndarrays()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("features", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    os.environ |= {
        "FAULT": given.fault,
        "FEATURES": str(given.features.resolve()),
        "AUDIT_OUT": str(given.out.resolve()),
    }
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
