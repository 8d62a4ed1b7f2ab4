"""The round in Apple's pfl: one full-batch step per client, whose update is clipped as a whole.

pfl has no per-example clipping, so this round gives a weaker guarantee and is cheaper. Its single process may use all
cores. The mean of the updates gets the same noise as in the other simulators. Prints one JSON line.
"""

import itertools
import json
import statistics
import time
from importlib.metadata import version
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import to_tensor
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from private_round import CLIENTS, LEARNING_RATE, ROUNDS, ROWS, accuracy, rows_of, start


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = torch.nn.Parameter(start()[0])

    def loss(self, x: Any, y: Any, eval: bool = False) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(to_tensor(x) @ self.theta, to_tensor(y).long())

    def metrics(self, x: Any, y: Any) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    def __init__(self) -> None:
        self.round_ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.round_ends.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    users = {client: Dataset(rows_of(client)) for client in range(CLIENTS)}
    data = FederatedDataset(users.get, get_user_sampler("minimize_reuse", list(users)))
    # noise on the sum of all updates; in fedsweep every client adds noise to its sum of gradients
    noise = LEARNING_RATE / ROWS * start()[1] * CLIENTS**0.5
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(clipping_bound=1.0, relative_noise_stddev=noise))
    head, clock = Head(), Clock()
    model = PyTorchModel(head, torch.optim.SGD, torch.optim.SGD(head.parameters(), 1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=10 * ROUNDS,
            train_cohort_size=CLIENTS,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, [mechanism]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=ROWS),
        NNEvalHyperParams(local_batch_size=ROWS),
        callbacks=[clock],
    )
    seconds = [after - before for before, after in itertools.pairwise(clock.round_ends[1:])]
    report = {
        "name": f"pfl {version('pfl')}",
        "what": "client-level clipping only",
        "ms_per_round": 1e3 * statistics.median(seconds),
        "accuracy": accuracy(head.theta.detach()),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
