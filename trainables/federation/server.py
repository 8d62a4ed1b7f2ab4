"""The server: owns the lanes' weights and state, drives the rounds, applies the update and evaluates."""

from __future__ import annotations

import bisect
import io
import itertools
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from trainables.federation import gpu_memory
from trainables.federation.client_host import ClientHost, ClientStateLostError, ClientStates, HostReply, Sent
from trainables.federation.denormals import taken_for_zero
from trainables.federation.exact_sum import from_grid
from trainables.federation.lane_metrics import LaneNotes
from trainables.federation.lane_result import LaneResult, Progress
from trainables.federation.pack import (
    ClientWork,
    LaneGroup,
    assign,
    client_work,
    lane_groups,
    order_lanes,
    pack_group,
    program_of,
    select_lanes,
)
from trainables.federation.problem import Shipment, fetch
from trainables.federation.trial_spec import TrialSpec
from trainables.methods.base import State
from trainables.models import kernels
from trainables.models.centring import centred, for_raw_features
from trainables.models.kernels import Kernel
from trainables.models.lanes import SHAPES
from trainables.models.shard import Shard
from trainables.privacy.participation import cohort


class Hosts(Protocol):
    """The client hosts of a federation, wherever they live."""

    count: int

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        """What the clients release once, host by host."""

    def round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> list[HostReply]:
        """One message to every host and one back."""

    def states(self) -> list[ClientStates | None]:
        """What the clients keep, host by host."""

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        """Give the clients back what they kept, on whichever host they are now."""


class HostsHere:
    """Client hosts in the caller's own process, one after the other: for tests, benchmarks and reading."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        self.count = count
        self._hosts = [ClientHost(index, device) for index in range(count)]

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        return [host.prepare(work) for host in self._hosts[: len(work.assignment)]]

    def round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> list[HostReply]:
        return [host.round(work, t, sent, diagnose) for host in self._hosts[: len(work.assignment)]]

    def states(self) -> list[ClientStates | None]:
        return [host.states() for host in self._hosts]

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        for host, clients in zip(self._hosts, work.assignment, strict=False):
            host.restore(work, states.of(clients))


class Server:
    def __init__(self, hosts: Hosts, device: str = "cpu", kernel: Kernel | None = None) -> None:
        """`kernel`: what it evaluates with, if not what this process does anyway."""
        if kernel is not None:
            kernels.choose(kernel, device)
        self.hosts = hosts
        self.device = device
        self._evaluation: tuple[str, Shard] | None = None
        if device == "cpu":
            torch.set_num_threads(1)

    # ---- a pack's life

    def open(self, trials: Sequence[TrialSpec], shipment: Shipment, snapshot: bytes | None = None) -> None:
        """Start a pack, or take it up again where `snapshot` left it."""
        if len({pack_group(trial) for trial in trials}) > 1:
            raise ValueError("these trials cannot share a pack")
        if any(trial.problem.key != shipment.key for trial in trials):
            raise ValueError("the shipment is of another problem than the trials")
        self._opened = (list(trials), shipment)
        self._kept = snapshot
        self._noted: dict[str, torch.Tensor] = {}
        self._final: np.ndarray | None = None
        self.trials = order_lanes(trials)
        self.shipment = shipment
        self._results = {trial.key: LaneResult(trial.key) for trial in self.trials}
        self._notes = LaneNotes()
        self.t = 0
        self._work = client_work(self.trials, shipment, self.hosts.count)
        self._groups = lane_groups(self.trials, shipment.model, self.device)
        self.theta = torch.stack([shipment.model.initial(trial.seed) for trial in self.trials]).to(self.device)
        self._states: list[State] = [
            group.method.initial_state(self.theta[group.lanes], group.hypers) for group in self._groups
        ]
        if snapshot is not None:
            self._restore(snapshot)

    @property
    def results(self) -> dict[str, LaneResult]:
        """What is known of every lane of the pack, by its key."""
        self._tell()
        return self._results

    def _tell(self) -> None:
        self._notes.tell([self._results[trial.key] for trial in self.trials])

    @property
    def rounds(self) -> int:
        return self.trials[0].last_round if self.trials else 0

    def advance(self, until: int) -> list[LaneResult]:
        """Run rounds up to and including `until`; what is known of every lane of the pack then."""
        self._advance(until)
        return list(self.results.values())

    def _advance(self, until: int) -> None:
        with taken_for_zero():
            self._rounds_until(until)
        if self.device == "cuda":  # what was asked for is done, not only begun: others time it
            began = time.perf_counter()
            torch.cuda.synchronize()
            self._notes.seconds += (time.perf_counter() - began) / max(1, len(self.trials))

    def _rounds_until(self, until: int) -> None:
        every = next(iter(self.trials)).evaluate_every if self.trials else 1
        while self.trials and self.t < min(until, self.rounds):
            began = time.perf_counter()
            last = self.t + 1 == self.rounds
            evaluate = last or (self.t + 1) % every == 0
            try:
                self._round(evaluate)
            except ClientStateLostError:
                self._go_back()
                continue
            if evaluate:
                self._evaluate(last)
                self._write_down()
            self._notes.seconds += (time.perf_counter() - began) / max(1, len(self.trials))
            if evaluate:
                self._retire(last)

    def _go_back(self) -> None:
        """To the last snapshot; the rounds since are repeated."""
        self.open(*self._opened, self._kept)

    def _repeat(self, until: int) -> None:
        self._go_back()
        self._advance(until)

    def progress(self, until: int) -> Progress:
        """As `advance`, but says only how it stands: of a thousand lanes all metrics are slow to send."""
        self._advance(until)
        told = sum(lane.seconds for lane in self._results.values())
        return Progress(len(self.trials), told + self._notes.seconds * len(self.trials))

    def pickled_results(self) -> bytes:
        return pickle.dumps(list(self.results.values()))

    def final_weights(self) -> np.ndarray | None:
        """Of a trial that ran to its end in a pack of its own; those of many lanes nobody asks for."""
        return None if self._final is None else self._final[0]

    def lanes_that_fit(self, trials: Sequence[TrialSpec], shipment: Shipment, share: float) -> int | None:
        """Trials like these, into the free memory of the GPU, of which a host may use a share. A CPU knows no bound."""
        if self.device != "cuda":
            return None
        hosts = assign(shipment.sizes, self.hosts.count)
        clients = max(hosts, key=lambda mine: sum(shipment.sizes[client] for client in mine))
        sizes = [shipment.sizes[client] for client in clients]
        stateful = program_of(trials[0]).stateful
        fits = gpu_memory.lanes_that_fit(shipment.model, sizes, stateful, gpu_memory.free_bytes(share))
        # an estimate; whether even a block of lanes, which is always computed whole, is too much is seen by trying
        return max(SHAPES["cuda"].lanes, fits)

    # ---- the round

    def _round(self, diagnose: bool) -> None:
        if self.t == 0:
            self._centre()
            self._receive()
        # 1. theta goes out to every host, 2. every client's release comes back, summed per host
        replies = self.hosts.round(self._work, self.t + 1, self._message(), diagnose)
        self.t += 1
        # 3. the mean over the clients that took part, exact whatever the hosts
        count = cohort(len(self.shipment.sizes), self._work.program.participation)
        G = self._sum(reply.total for reply in replies).div_(count).to(self.theta)
        # 4. the method's update, lane by lane
        theta = torch.empty_like(self.theta)
        for group, state in zip(self._groups, self._states, strict=True):
            lanes = group.lanes
            theta[lanes] = group.method.step(self.t, self.theta[lanes], G[lanes], state, group.hypers)
        self.theta = theta
        if diagnose:
            found = [reply.diagnostics for reply in replies if reply.diagnostics is not None]
            self._note("train_loss", self._sum(d.loss for d in found) / count)
            self._note("clipped_share", 100 * self._sum(d.clipped for d in found) / count)
            self._note("signal_norm", (self._sum(d.signal for d in found) / count).norm(dim=1))
            self._note("noise_norm", (self._sum(d.noise for d in found) / count).norm(dim=1))

    def _centre(self) -> None:
        """The private mean of the features, from which on they are what lies about it."""
        if self._work.wants_centre:
            mean = self._sum(self.hosts.prepare(self._work)).div_(len(self.shipment.sizes))
            # one noise for all lanes: trials with other means are in other packs
            self._work = replace(self._work, centre=mean[0].to(self.theta).cpu().numpy())

    def _receive(self) -> None:
        """What the clients release once."""
        if not self._work.program.prepares:
            return
        prepared = self._sum(self.hosts.prepare(self._work)).div_(len(self.shipment.sizes)).to(self.theta)
        which = torch.from_numpy(self._work.distinct_noises()[1]).to(self.device)
        for group, state in zip(self._groups, self._states, strict=True):
            group.method.receive(prepared, which[group.lanes], state, group.hypers)

    def _message(self) -> Sent:
        """theta, and what the methods broadcast beside it, laned like theta."""
        pairs = zip(self._groups, self._states, strict=True)
        parts = [group.method.broadcast(state, group.hypers) for group, state in pairs]
        extra = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {"theta": self.theta, **extra}

    def _sum(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return from_grid(torch.stack([part.to(self.device) for part in parts]).sum(0))

    def _note(self, name: str, values: torch.Tensor) -> None:
        """To be written down when all metrics of the round are there."""
        self._noted[name] = values.double()

    def _write_down(self) -> None:
        """All metrics of a round at once: the one time that anybody waits for the device."""
        finite = torch.isfinite(self.theta).all(dim=1).double()
        alive, *table = torch.stack([finite, *self._noted.values()]).cpu().numpy()
        names = list(self._noted)
        self._notes.page(self.t, names, np.stack(table))
        for lane in np.flatnonzero((alive == 0) | ~np.isfinite(table[names.index("loss")])):
            self._results[self.trials[lane].key].state = "diverged"
        self._noted = {}

    def _evaluate(self, last: bool) -> None:
        shard = self._evaluation_shard()
        loss, correct = self.shipment.model.evaluate(shard, self.theta)
        self._note("loss", loss)
        if self.shipment.truth is not None:
            truth = torch.from_numpy(self.shipment.truth).to(self.device).flatten()
            self._note("squared_error", (self.weights().double() - truth).square().sum(1))
        if correct is None:
            return
        # a count first: an average of single-precision ones would round
        self._note("accuracy", 100 * correct.sum(1).double() / shard.rows)
        if last and self.trials[0].problem.evaluate_on == "test":
            bits = np.packbits(correct.cpu().numpy(), axis=1)
            for trial, row in zip(self.trials, bits, strict=True):
                self._results[trial.key].correct = row.tobytes()

    def weights(self) -> torch.Tensor:
        """The lanes' weights as they apply to features as they came."""
        return for_raw_features(self.theta, self._work.centre, self.shipment.model.blocks[0])

    def _evaluation_shard(self) -> Shard:
        centre = self._work.centre
        held = f"{self.shipment.key}:{b'' if centre is None else centre.tobytes()!r}"
        if self._evaluation is None or self._evaluation[0] != held:
            x, y = centred(fetch(self.shipment.x_eval), centre), fetch(self.shipment.y_eval)
            self._evaluation = (held, Shard.build([(x, y)], self.device))
        return self._evaluation[1]

    # ---- lanes that end

    def _retire(self, last: bool) -> None:
        for trial in self.trials if last else ():
            if self._results[trial.key].state == "running":
                self._results[trial.key].state = "done"
        if last and len(self._results) == 1:
            self._final = self.weights().cpu().numpy()
        self._compact()

    def _compact(self) -> None:
        """Go on with the running lanes alone."""
        keep = [i for i, trial in enumerate(self.trials) if self._results[trial.key].state == "running"]
        if len(keep) == len(self.trials):
            return
        self._tell()
        self._work = select_lanes(self._work, keep)
        groups: list[LaneGroup] = []
        states: list[State] = []
        for group, state in zip(self._groups, self._states, strict=True):
            mine = [i - group.start for i in keep if group.start <= i < group.stop]
            if not mine:
                continue
            start = groups[-1].stop if groups else 0
            hypers = {
                name: value[mine] if isinstance(value, torch.Tensor) else value for name, value in group.hypers.items()
            }
            groups.append(LaneGroup(group.method, start, start + len(mine), hypers))
            states.append({name: value[mine] for name, value in state.items()})
        self._groups, self._states = groups, states
        self.theta = self.theta[keep]
        self.trials = [self.trials[i] for i in keep]

    # ---- snapshots

    def snapshot(self) -> bytes:
        """Everything needed to go on from here: plain tensors and numbers, no code."""
        until = self.t
        while True:
            try:
                return self._keep()
            except ClientStateLostError:
                self._repeat(until)

    def _keep(self) -> bytes:
        clients = None
        if self._work.program.stateful and self.t > 0:
            busy = self.hosts.states()[: len(self._work.assignment)]  # the others may still hold another pack's clients
            clients = ClientStates.merged(busy, self.t)
        buffer = io.BytesIO()
        torch.save(
            {
                "t": self.t,
                "lanes": [trial.key for trial in self.trials],
                "groups": [group.stop - group.start for group in self._groups],
                "theta": self.theta.cpu(),
                "centre": None if self._work.centre is None else torch.from_numpy(self._work.centre),
                "states": [{name: v.cpu() for name, v in state.items()} for state in self._states],
                "results": {k: {**vars(r), "correct": r.correct.hex()} for k, r in self.results.items()},
                "clients": vars(clients) if clients else None,
            },
            buffer,
        )
        self._kept = buffer.getvalue()
        return self._kept

    def _restore(self, snapshot: bytes) -> None:
        """All lanes of the snapshot, or some of them: a pack may be split and its parts go on from here."""
        saved: dict[str, Any] = torch.load(io.BytesIO(snapshot), weights_only=True)
        mine = [trial.key for trial in self.trials]
        if not set(mine) <= set(saved["results"]):
            raise ValueError("the snapshot belongs to another pack")
        self._results = {
            key: LaneResult(**{**fields, "correct": bytes.fromhex(fields["correct"])})
            for key, fields in ((key, saved["results"][key]) for key in saved["results"] if key in set(mine))
        }
        self._compact()
        place = {key: index for index, key in enumerate(saved["lanes"])}
        if any(trial.key not in place for trial in self.trials):
            raise ValueError("the snapshot belongs to another pack")
        index = [place[trial.key] for trial in self.trials]
        starts = list(itertools.accumulate(saved["groups"], initial=0))
        self.t = saved["t"]
        self.theta = saved["theta"][index].to(self.device)
        if saved["centre"] is not None:
            self._work = replace(self._work, centre=saved["centre"].numpy())
        self._states = []
        for group in self._groups:  # lanes of one group were neighbours there, too
            old = bisect.bisect_right(starts, index[group.start]) - 1
            rows = [lane - starts[old] for lane in index[group.lanes]]
            self._states.append({name: v[rows].to(self.device) for name, v in saved["states"][old].items()})
        if saved["clients"]:
            self.hosts.restore(self._work, ClientStates(**saved["clients"]))


def run_here(
    trials: Sequence[TrialSpec], shipment: Shipment, hosts: int = 1, device: str = "cpu"
) -> dict[str, LaneResult]:
    """A whole pack in this process, without Ray."""
    server = Server(HostsHere(hosts, device), device)
    server.open(trials, shipment)
    server.advance(server.rounds)
    return server.results
