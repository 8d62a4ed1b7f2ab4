"""The client host keeps the rows of its clients on its device and computes their releases, one call per round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.choices import Aggregate
from trainables.data.stored import StoredRows
from trainables.federation.batch_round import Batch, BatchRound, Diagnostics
from trainables.federation.denormals import flush_denormals
from trainables.federation.exact_sum import to_grid
from trainables.federation.lane_vectors import LaneVectors
from trainables.federation.pack import ClientWork, is_computed_client_by_client
from trainables.federation.staging import Staging
from trainables.methods.base import State
from trainables.models import Model, at_cut, centring
from trainables.models.centres import Centres
from trainables.models.lanes import SHAPES
from trainables.models.network import NetworkModel
from trainables.models.shard import Shard
from trainables.plugin_errors import plugin_errors


@dataclass(frozen=True)
class HostReply:
    """What leaves a host in a round: the sum of its clients' releases, on the exact grid."""

    total: torch.Tensor
    diagnostics: Diagnostics | None


class ClientStateLostError(RuntimeError):
    """A host was restarted and has lost its clients' states: the pack must resume from a checkpoint."""


@dataclass(frozen=True)
class ClientStates:
    """The states of clients after round t. Every tensor has one row per lane."""

    lanes: tuple[str, ...]
    t: int
    clients: dict[int, State]

    @classmethod
    def merge(cls, parts: Sequence[ClientStates | None], t: int) -> ClientStates:
        """The states of all hosts after round t. A host that was restarted since then has none."""
        current = [part for part in parts if part is not None and part.t == t]
        if len(current) < len(parts):
            raise ClientStateLostError(
                f"{len(parts) - len(current)} client hosts do not hold the state after round {t}"
            )
        return cls(current[0].lanes, t, {c: state for part in current for c, state in part.clients.items()})

    def of(self, clients: Iterable[int]) -> ClientStates:
        return ClientStates(self.lanes, self.t, {client: self.clients[client] for client in clients})


Broadcast = Mapping[str, torch.Tensor]
"""What the server sends to every host: `theta`, and whatever else the method broadcasts."""


class ClientHost:
    round_view: Callable[..., BatchRound] = BatchRound
    """Makes the `ClientRound` of a batch; an audit replaces it to observe programs."""

    def __init__(self, index: int, device: str = "cpu") -> None:
        self.index = index
        self.device = device
        self._loaded: str | None = None
        """Identifies the data and the clients of `_raw_batches`."""
        self._raw_batches: list[Batch] = []
        self._settings: object = None
        """Settings of the network that `_raw_batches` are for."""
        self._batches: list[Batch] = []
        """`_raw_batches`, or the same rows centred for every lane."""
        self._centre: NDArray[np.float32] | None = None
        """Centres of the lanes of `_batches`."""
        self._states: tuple[tuple[str, ...], int, list[State]] | None = None
        """The lanes, the round, and the state of every batch, (clients, lanes, ...)."""
        self._lane_vectors: tuple[ClientWork, LaneVectors] | None = None
        self._staging: Staging | None = None
        if device == "cpu":
            # other hosts use the other cores; within a round, hosts do not wait for one another
            torch.set_num_threads(1)

    def prepare(self, work: ClientWork) -> torch.Tensor:
        """The sum, on the exact grid, of what the clients release before the first round. The server calls this up to
        three times: for the lengths of the rows if features are scaled, for the mean of the features if they are
        centred, and for what the program prepares."""
        with flush_denormals():
            self._load(work)
            lanes = self._lanes(work)
            parts = []
            for batch in self._batches:
                ones = torch.ones(len(batch.clients), len(work.lanes), 1, device=self.device)
                view = self.round_view(batch, 0, work, lanes, ones)
                weighting: Aggregate = "size" if work.level == "record" else "uniform"
                if work.needs_length:
                    part = view.noisy_length_shares() * _weights(batch, work, weighting)
                elif work.needs_centre:
                    part = view.noisy_feature_mean() * _weights(batch, work, weighting)
                else:
                    with _errors_of_program():
                        part = work.program.prepare(view)
                    part = part * _weights(batch, work, work.aggregate)
                parts.append(to_grid(part).sum(0))
            return torch.stack(parts).sum(0)

    def round(self, work: ClientWork, t: int, broadcast: Broadcast, diagnose: bool) -> HostReply:
        """The sum of every client's release in round t: a pure function of the arguments and of the clients' states
        after round t - 1, which this host must hold."""
        with flush_denormals():
            self._load(work)
            states = self._states_before(work, t)
            others = {name: value.to(self.device) for name, value in broadcast.items()}
            theta = others.pop("theta")
            lanes = self._lanes(work)
            size = work.program.release_size(work.data.model)
            total = torch.zeros(theta.shape[0], size, dtype=torch.float64, device=self.device)
            diagnostics = Diagnostics.zeros_like(theta) if diagnose else None
            for batch, state in zip(self._batches, states, strict=True):
                weights = lanes.client_weights(batch.clients, t, work)
                if weights is None:
                    continue
                view = self.round_view(batch, t, work, lanes, weights, others, state, diagnostics)
                with _errors_of_program():
                    release = work.program.round(view, theta)
                release = release.expand(len(batch.clients), *total.shape)
                view.check_participation_kept_secret()
                total += to_grid(release if work.all_alike else release * weights).sum(0)
            self._states = (work.lanes, t, states)
            return HostReply(total, diagnostics)

    def _lanes(self, work: ClientWork) -> LaneVectors:
        """Reused from round to round while `work` is the same object."""
        if self._lane_vectors is None or self._lane_vectors[0] is not work:
            if self.device == "cuda" and self._staging is None:
                self._staging = Staging()
            self._lane_vectors = (work, LaneVectors(work, self.device, self._staging))
        return self._lane_vectors[1]

    def _states_before(self, work: ClientWork, t: int) -> list[State]:
        """The clients' states after round t - 1, batch by batch, for the lanes that are still running."""
        if t == 1 or not work.program.stateful:
            return [{} for _ in self._batches]
        if self._states is None or self._states[1] != t - 1 or not set(work.lanes) <= set(self._states[0]):
            raise ClientStateLostError(f"client host {self.index} does not hold the state after round {t - 1}")
        lanes, _, states = self._states
        # copies of the dictionaries: a round that fails half-way must not change the states
        if lanes == work.lanes:
            return [dict(state) for state in states]
        index = [lanes.index(lane) for lane in work.lanes]
        return [{name: value[:, index] for name, value in state.items()} for state in states]

    def states(self) -> ClientStates | None:
        """For checkpoints: client by client, on the CPU."""
        if self._states is None:
            return None
        lanes, t, states = self._states
        by_client = {
            client: {name: value[i].cpu() for name, value in state.items()}
            for batch, state in zip(self._batches, states, strict=True)
            for i, client in enumerate(batch.clients)
        }
        return ClientStates(lanes, t, by_client)

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        self._load(work)
        by_batch = [
            {
                name: torch.stack([states.clients[client][name] for client in batch.clients]).to(self.device)
                for name in states.clients[batch.clients[0]]
            }
            for batch in self._batches
        ]
        self._states = (states.lanes, states.t, by_batch)

    def _load(self, work: ClientWork) -> None:
        """Load the clients' rows and centre them, unless this is done already."""
        clients, sizes = work.assignment[self.index], work.data.sizes
        model = work.data.model
        apart = is_computed_client_by_client(work.program, model, self.device)
        # rows are rounded to `precision` after centring; a network centres the inputs of its head, not its rows
        centred = work.preprocesses and not isinstance(model, NetworkModel)
        precision = "float32" if centred else work.precision
        wanted = f"{work.data.key}:{clients}:{apart}:{precision}"
        if self._loaded != wanted:
            self._loaded, self._states, self._raw_batches = None, None, []
            self._batches, self._centre = self._raw_batches, None
            x, y, rows = (work.data.load(name) for name in ("x", "y", "rows"))
            features_of = _reader(x, {client: rows[client] for client in clients})
            for batch, length in SHAPES[self.device].batches(clients, sizes, model.dimension, apart):
                parts = [
                    (at_cut(model, features_of(client), self.device, public_size=sizes[client]), y[rows[client]])
                    for client in batch
                ]
                public_sizes = [sizes[client] for client in batch]
                shard = Shard.build(parts, self.device, rows=length, sizes=public_sizes, precision=precision)
                self._raw_batches.append(Batch.load(batch, shard, model))
            self._loaded, self._settings = wanted, _settings(model)
        if self._settings != _settings(model):  # a network with other hyperparameters, and the same rows
            self._raw_batches = [Batch.load(batch.clients, batch.shard, model) for batch in self._raw_batches]
            self._batches, self._centre, self._settings = self._raw_batches, None, _settings(model)
        if self._centre is not work.centre:
            self._batches, self._centre = self._raw_batches, work.centre
            if work.centre is not None:
                centres = Centres.of(work.centre, self.device, work.factor)
                self._batches = [
                    Batch.load(batch.clients, centring.with_centres(model, batch.shard, centres, work.precision), model)
                    for batch in self._raw_batches
                ]


def _settings(model: Model) -> object:
    return model.settings if isinstance(model, NetworkModel) else None


def _errors_of_program() -> contextlib.AbstractContextManager[None]:
    return plugin_errors("a client's round", retry_environment=True)


def _reader(x: NDArray[np.float32] | StoredRows, rows: Mapping[int, NDArray[np.int64]]) -> Callable[[int], Any]:
    """A function that returns the features of a client. Call it once per client: a file is read in one pass for all."""
    if isinstance(x, StoredRows):
        return dict(zip(rows, x.parts(list(rows.values())), strict=True)).pop
    return lambda client: x[rows[client]]


def _weights(batch: Batch, work: ClientWork, aggregate: Aggregate) -> torch.Tensor:
    """Weights of the batch's clients if all clients take part; the mean over all clients is 1."""
    size, sizes = batch.shard.size, work.data.sizes
    return size * (len(sizes) / sum(sizes)) if aggregate == "size" else torch.ones_like(size)
