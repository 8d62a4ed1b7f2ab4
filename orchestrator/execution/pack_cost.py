"""What a pack costs, estimated from its trials and the sizes of the clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.execution.packing import passes, taking_part
from trainables.federation.pack import is_computed_client_by_client, program_of
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import TrialSpec
from trainables.models import operations
from trainables.models.lanes import SHAPES
from trainables.models.network import NetworkModel

CALL_S = 1e-3  # seconds of one core per local step and batch of clients, for a batch of any size
LAYER_S = 4e-4  # seconds of one core per local step, client, lane and layer of a network, for any number of rows
NOISE_S = 6e-6  # seconds of one core per local step and client to draw noise, for any number of weights


@dataclass(frozen=True)
class PackCost:
    operations: float
    """Floating-point operations on the rows of all clients, padding rows included."""
    overhead_s: float
    """Seconds of one core that do not depend on the number of rows."""

    @classmethod
    def of(cls, pack: Sequence[TrialSpec], problem: Problem, device: str) -> PackCost:
        first, sizes, model = pack[0], problem.partition.sizes, problem.model
        apart = is_computed_client_by_client(program_of(first), model, device)
        batches = SHAPES[device].batches(range(len(sizes)), sizes, model.dimension, apart)
        rows = sum(len(clients) * padded for clients, padded in batches)
        steps = first.last_round * float(first.hyperparameters.get("local_steps", 1))
        seeds = len({trial.seed for trial in pack})
        if isinstance(model, NetworkModel) and device == "cpu":
            calls_s = taking_part(first, seeds) * len(sizes) * len(pack) * model.layers * LAYER_S
        else:
            calls_s = len(batches) * CALL_S
        noises = len(sizes) * seeds  # drawn once for all lanes of a seed
        return cls(
            operations(model) * rows * sum(trial.last_round * passes(trial, device, seeds) for trial in pack),
            steps * (calls_s + noises * NOISE_S),
        )
