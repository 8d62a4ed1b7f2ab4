"""The private round in Flower's simulation engine. Prints one JSON line."""

import itertools
import json
import statistics
import time
from importlib.metadata import version

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from private_round import CLIENTS, ROUNDS, accuracy, private_step, rows_of, start

THETA, NOISE = start()
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)  # one process per core
    theta = message.content["arrays"].to_torch_state_dict()["theta"]
    x, y = rows_of(int(context.node_config["partition-id"]))
    theta = private_step(theta, x, y, NOISE * torch.randn_like(theta))
    reply = {"arrays": ArrayRecord({"theta": theta}), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(reply), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    round_ends = []
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    initial = ArrayRecord({"theta": THETA})
    result = strategy.start(grid, initial, ROUNDS, evaluate_fn=lambda *_: round_ends.append(time.perf_counter()))
    seconds = [after - before for before, after in itertools.pairwise(round_ends[2:])]
    print(
        json.dumps(
            {
                "name": f"Flower {version('flwr')}, simulation engine",
                "what": "per-example clipping",
                "ms_per_round": 1e3 * statistics.median(seconds),
                "accuracy": accuracy(result.arrays.to_torch_state_dict()["theta"]),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
