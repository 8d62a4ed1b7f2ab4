"""The server owns the lanes' weights and state, drives the rounds, applies the updates and evaluates."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainables import metrics
from trainables.federation import continuation, gpu_memory
from trainables.federation.checkpoint_checks import check_results, check_round, check_weights
from trainables.federation.checkpoints import UnusableCheckpointError
from trainables.federation.client_host import Broadcast, ClientStateLostError, ClientStates
from trainables.federation.denormals import flush_denormals
from trainables.federation.exact_sum import from_grid
from trainables.federation.hosts import Hosts
from trainables.federation.lane_metrics import MetricsBuffer
from trainables.federation.lane_result import LaneResult, Progress
from trainables.federation.memory_errors import is_out_of_memory
from trainables.federation.pack import (
    CENTRE,
    LENGTHS,
    LaneGroup,
    assign,
    client_work,
    lane_groups,
    order_lanes,
    pack_group,
    program_of,
    select_lanes,
)
from trainables.federation.problem import ProblemData
from trainables.federation.server_step import ServerStep
from trainables.federation.trial_spec import TrialSpec
from trainables.methods.base import State
from trainables.metrics.base import Predictions
from trainables.models import at_cut, centring, configured, kernels
from trainables.models.centres import Centres
from trainables.models.kernels import Kernel
from trainables.models.lanes import SHAPES
from trainables.models.shard import Shard
from trainables.plugin_errors import PluginError, plugin_errors
from trainables.privacy import lengths
from trainables.privacy.noisy_means import shrunk, std_of_mean
from trainables.privacy.participation import cohort


class Server:
    def __init__(self, hosts: Hosts, device: str = "cpu", kernel: Kernel | None = None) -> None:
        """`kernel`: used for evaluation; default: the one this process has chosen."""
        if kernel is not None:
            kernels.choose(kernel, device)
        self.hosts = hosts
        self.device = device
        self._evaluation_rows: tuple[str, Shard] | None = None
        self._evaluation: tuple[np.ndarray, Shard] | None = None
        """The lanes' centres, and the evaluation rows centred with them."""
        if device == "cpu":
            torch.set_num_threads(1)

    # ---- the life of a pack

    def open(
        self,
        trials: Sequence[TrialSpec],
        data: ProblemData,
        checkpoint: bytes | None = None,
        paused: Sequence[bytes] = (),
    ) -> None:
        """Start a pack, resume it from `checkpoint`, or continue the lanes of packs that stopped early (`paused`)."""
        if len({pack_group(trial) for trial in trials}) > 1:
            raise ValueError("these trials cannot share a pack")
        if any(trial.problem.key != data.key for trial in trials):
            raise ValueError("the data belong to another problem than the trials")
        if paused:
            with _unusable_checkpoints():
                checkpoint = continuation.joined(paused, trials)
        self._opened = (list(trials), data)
        self._last_checkpoint = checkpoint
        self._seconds_before = 0.0
        """Seconds that were spent on the shorter trials that this pack continues."""
        self._measured: dict[str, torch.Tensor] = {}
        """Metrics of the current round."""
        self._any_failed = False
        self._final: np.ndarray | None = None
        self._paused: tuple[list[str], bytes] | None = None
        self.trials = order_lanes(trials)
        self.data = data = replace(data, model=configured(data.model, trials[0].hyperparameters))
        self._results = {trial.key: LaneResult(trial.key) for trial in self.trials}
        self._metrics = MetricsBuffer()
        self.t = 0
        self._work = client_work(self.trials, data, self.hosts.count)
        self._use_groups(lane_groups(self.trials, data.model, self.device))
        self._states: list[State] = [{} for _ in self._groups]
        self.theta = torch.zeros(len(self.trials), data.model.dimension, device=self.device)
        with self._failing_all_lanes():
            with self._errors_of_model():
                self.theta = torch.stack([data.model.initial(trial.seed) for trial in self.trials]).to(self.device)
            states = self._by_group(lambda group, _: group.method.initial_state(self.theta[group.lanes], group.hypers))
            self._states = [{} if state is None else state for state in states]
        self._drop_failed_lanes()
        if checkpoint is not None:
            with _unusable_checkpoints():
                clients = self._restore(checkpoint)
            if clients is not None:
                self.hosts.restore(self._work, clients)
        self._seconds_before = sum(lane.seconds for lane in self._results.values()) if paused else 0.0

    def _use_groups(self, groups: list[LaneGroup]) -> None:
        self._groups = groups
        self._steps = {group.start: ServerStep(group, self.device) for group in groups}

    @property
    def results(self) -> dict[str, LaneResult]:
        """What is known about every lane of the pack, by trial key."""
        self._flush_metrics()
        return self._results

    def _flush_metrics(self) -> None:
        self._metrics.flush([self._results[trial.key] for trial in self.trials])

    @property
    def rounds(self) -> int:
        return self.trials[0].last_round if self.trials else 0

    def advance(self, until: int) -> list[LaneResult]:
        """Run rounds up to and including `until`."""
        self.progress(until)
        return list(self.results.values())

    def progress(self, until: int) -> Progress:
        """Like `advance`, without results while lanes are running: the metrics of a thousand lanes are slow to send."""
        with flush_denormals(), self._failing_all_lanes():
            self._run_rounds(until)
        if self.device == "cuda":  # callers time the rounds, so wait until they are computed
            began = time.perf_counter()
            torch.cuda.synchronize()
            self._metrics.seconds += (time.perf_counter() - began) / max(1, len(self.trials))
        flushed = sum(lane.seconds for lane in self._results.values())
        seconds = flushed + self._metrics.seconds * len(self.trials) - self._seconds_before
        return Progress(len(self.trials), self.t, seconds, () if self.trials else list(self.results.values()))

    def _run_rounds(self, until: int) -> None:
        every = self.trials[0].evaluate_every if self.trials else 1
        while self.trials and self.t < min(until, self.rounds):
            began = time.perf_counter()
            last = self.t + 1 == self.rounds
            evaluate = last or (self.t + 1) % every == 0
            try:
                self._round(evaluate)
            except ClientStateLostError:
                self._rewind()
                continue
            if evaluate and self.trials:
                self._evaluate(last)
                self._record_metrics()
            self._metrics.seconds += (time.perf_counter() - began) / max(1, len(self.trials))
            if evaluate:
                self._retire(last)

    def _rewind(self) -> None:
        """Return to the last checkpoint; the rounds since then are repeated."""
        self.open(*self._opened, self._last_checkpoint)

    def final_weights(self) -> np.ndarray | None:
        """The weights of the pack's trial, if the pack has only one; None until it is done."""
        return None if self._final is None else self._final[0]

    def lanes_that_fit(self, trials: Sequence[TrialSpec], data: ProblemData, share: float = 1.0) -> int | None:
        """How many trials like these fit into the GPU's free memory. A host may use the fraction `share` of the GPU.
        None, which means no limit, on the CPU and for a single trial."""
        if self.device != "cuda" or len(trials) == 1:
            return None
        hosts = assign(data.sizes, self.hosts.count)
        busiest = max(hosts, key=lambda clients: sum(data.sizes[client] for client in clients))
        sizes = [data.sizes[client] for client in busiest]
        stateful = program_of(trials[0]).stateful
        centred, free = trials[0].preprocess.center > 0 or trials[0].preprocess.scales, gpu_memory.free_bytes(share)
        fits = gpu_memory.lanes_that_fit(data.model, sizes, stateful, free, centred)
        # at least one block of lanes, which is always computed whole: whether it fits is found out by trying
        return max(SHAPES["cuda"].lanes, fits)

    def close(self) -> None:
        """Nothing to stop: hosts of this process end with it."""

    # ---- the round

    def _round(self, diagnose: bool) -> None:
        if self.t == 0:
            self._scale()
            self._centre()
            self._prepare()
        # 1. theta goes out to every host, 2. every client's release comes back, summed per host
        broadcast = self._broadcast()
        if not self.trials:
            return
        replies = self.hosts.round(self._work, self.t + 1, broadcast, diagnose)
        self.t += 1
        # 3. the mean over the clients that took part, exact for any number of hosts
        count = cohort(len(self.data.sizes), self._work.program.participation)
        G = self._sum(reply.total for reply in replies).div_(count).to(self.theta)
        # 4. the methods' updates, one group of lanes at a time
        theta = torch.empty_like(self.theta)
        updated = self._by_group(
            lambda group, state: self._steps[group.start](self.t, self.theta[group.lanes], G[group.lanes], state)
        )
        for group, weights in zip(self._groups, updated, strict=True):
            theta[group.lanes] = self.theta[group.lanes] if weights is None else weights
        self.theta = theta
        if diagnose:
            diagnostics = [reply.diagnostics for reply in replies if reply.diagnostics is not None]
            self._measured["train_loss"] = self._sum(d.loss for d in diagnostics) / count
            self._measured["clipped_share"] = 100 * self._sum(d.clipped for d in diagnostics) / count
            self._measured["signal_norm"] = (self._sum(d.signal for d in diagnostics) / count).norm(dim=1)
            self._measured["noise_norm"] = (self._sum(d.noise for d in diagnostics) / count).norm(dim=1)
        self._drop_failed_lanes()

    def _scale(self) -> None:
        """Compute the typical lengths from the private histogram of the rows' lengths."""
        work = self._work
        if work.needs_length:
            shares = self._sum(self.hosts.prepare(work)).div_(len(self.data.sizes)).cpu().numpy()
            first, which = work.distinct_noises()
            std = work.noise_std[LENGTHS][first].astype(np.float64)
            users, features = work.level == "user", self._features
            self._work = replace(work, length=lengths.typical(shares, std, self.data.sizes, users, features)[which])

    def _centre(self) -> None:
        """Compute the private means of the features, which hosts subtract from now on."""
        work = self._work
        if work.needs_centre:
            means = self._sum(self.hosts.prepare(work)).div_(len(self.data.sizes)).to(self.theta).cpu().numpy()
            first, which = work.distinct_noises()
            if self.trials[0].preprocess.shrink:
                std = work.noise_std[CENTRE][first].astype(np.float64)
                means = shrunk(means, std_of_mean(std, self.data.sizes, work.level == "user"))
            means = means[which]
            if work.length is not None:
                means = (means * (work.length[:, None] / lengths.TYPICAL)).astype(np.float32)
            self._work = replace(work, centre=means)
        elif work.scales and work.centre is None:
            self._work = replace(work, centre=np.zeros((len(work.lanes), self._features), dtype=np.float32))

    @property
    def _features(self) -> int:
        return self._raw_evaluation_rows().x.shape[2] - 1

    def _prepare(self) -> None:
        """Collect what the program releases once, before the first round."""
        if not self._work.program.prepares:
            return
        prepared = self._sum(self.hosts.prepare(self._work)).div_(len(self.data.sizes)).to(self.theta)
        which = torch.from_numpy(self._work.distinct_noises()[1]).to(self.device)
        self._by_group(lambda group, state: group.method.receive(prepared, which[group.lanes], state, group.hypers))
        self._drop_failed_lanes()

    def _broadcast(self) -> Broadcast:
        parts = self._by_group(lambda group, state: group.method.broadcast(state, group.hypers))
        self._drop_failed_lanes()
        sent = [part for part in parts if part is not None]
        names = sent[0] if sent else ()
        return {"theta": self.theta, **{name: torch.cat([part[name] for part in sent]) for name in names}}

    def _sum(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return from_grid(torch.stack([part.to(self.device) for part in parts]).sum(0))

    # ---- evaluation

    def _record_metrics(self) -> None:
        """Copy all metrics of the round from the device at once, so that the round waits for the device only once."""
        finite = torch.isfinite(self.theta).all(dim=1)
        alive, *table = torch.stack([each.double() for each in (finite, *self._measured.values())]).cpu().numpy()
        names = list(self._measured)
        self._metrics.add(self.t, names, np.stack(table))
        for lane in np.flatnonzero((alive == 0) | ~np.isfinite(table[names.index("loss")])):
            self._results[self.trials[lane].key].state = "diverged"
        self._measured = {}

    def _evaluate(self, last: bool) -> None:
        shard = self._evaluation_shard()
        with self._errors_of_model():
            loss, correct = centring.evaluate(self.data.model, shard, self.theta)
        self._measured["loss"] = loss
        if self.data.truth is not None:
            truth = torch.from_numpy(self.data.truth).to(self.device).flatten()
            self._measured["squared_error"] = (self.weights().double() - truth).square().sum(1)
        self._measure_scores(shard.y[0])
        if correct is None:
            return
        # count first: a single-precision mean would round
        self._measured["accuracy"] = 100 * correct.sum(1).double() / shard.rows
        if last and self.trials[0].problem.evaluate_on == "test":
            bits = np.packbits(correct.cpu().numpy(), axis=1)
            for trial, row in zip(self.trials, bits, strict=True):
                self._results[trial.key].correct = row.tobytes()

    def _measure_scores(self, labels: torch.Tensor) -> None:
        """Compute the trials' further metrics lane by lane, so that no lane's result depends on other lanes."""
        wanted = [metrics.get(name) for name in self.trials[0].metrics]
        if not wanted:
            return
        clients = self.data.clients_eval
        of_rows = None if clients is None else torch.from_numpy(clients).to(self.device)
        rows, values = self._raw_evaluation_rows().x[0], []
        for weights in self.weights():
            scores = self.data.model.scores(rows, weights).double()
            predictions = Predictions(scores, labels, of_rows)
            values.append(torch.stack([metric.compute(predictions).double() for metric in wanted]))
        for metric, by_lane in zip(wanted, torch.stack(values).T, strict=True):
            self._measured[metric.name] = by_lane

    def weights(self) -> torch.Tensor:
        """The lanes' weights, for features without preprocessing."""
        centre = self._work.centre
        if centre is None:
            return self.theta
        return Centres.of(centre, self.device, self._work.factor).for_raw_features(
            self.theta, self.data.model.blocks[0]
        )

    def _evaluation_shard(self) -> Shard:
        """The evaluation rows, centred for every lane if features are preprocessed."""
        centre, shard = self._work.centre, self._raw_evaluation_rows()
        if centre is None:
            return shard
        if self._evaluation is None or self._evaluation[0] is not centre or self._evaluation[1].x is not shard.x:
            centres = Centres.of(centre, self.device, self._work.factor)
            self._evaluation = (centre, centring.with_centres(self.data.model, shard, centres))
        return self._evaluation[1]

    def _raw_evaluation_rows(self) -> Shard:
        if self._evaluation_rows is None or self._evaluation_rows[0] != self.data.key:
            rows = at_cut(self.data.model, self.data.load("x_eval"), self.device), self.data.load("y_eval")
            self._evaluation_rows = (self.data.key, Shard.build([rows], self.device))
        return self._evaluation_rows[1]

    # ---- exceptions in methods and models

    def _by_group(self, call: Callable[[LaneGroup, State], Any]) -> list[Any]:
        """Call every group's method. If one raises an exception, its lanes fail, and its entry is None."""
        results = []
        for group, state in zip(self._groups, self._states, strict=True):
            members = self.trials[group.lanes]
            try:
                with plugin_errors(f"method {members[0].method}", retry_environment=True):
                    results.append(call(group, state))
            except PluginError as error:
                self._fail(members, error)
                results.append(None)
        return results

    def _errors_of_model(self) -> contextlib.AbstractContextManager[None]:
        return plugin_errors(f"model {self.trials[0].problem.model}", retry_environment=True)

    @contextlib.contextmanager
    def _failing_all_lanes(self) -> Iterator[None]:
        """Fail all lanes if the model or the clients' program, which all methods share, raises an exception."""
        try:
            yield
        except PluginError as error:
            self._fail(self.trials, error)
            self._drop_failed_lanes()

    def _fail(self, trials: Sequence[TrialSpec], error: PluginError) -> None:
        self._any_failed = True
        for trial in trials:
            self._results[trial.key].state, self._results[trial.key].reason = "failed", str(error)

    def _drop_failed_lanes(self) -> None:
        """Called in every round: fast if no lane has failed."""
        if self._any_failed:
            self._any_failed = False
            running = [i for i, trial in enumerate(self.trials) if self._results[trial.key].state == "running"]
            self._measured = {name: values[running] for name, values in self._measured.items()}
            self._drop_ended_lanes()

    # ---- lanes that end

    def _retire(self, last: bool) -> None:
        """Drop the lanes that have ended. After the last round, all lanes have."""
        if last and self.trials and self.trials[0].stop_after is not None:
            self._pause()
        for trial in self.trials if last else ():
            if self._results[trial.key].state == "running":
                self._results[trial.key].state = "done"
        if last and self.trials and len(self._results) == 1:
            self._final = self.weights().cpu().numpy()
        self._drop_ended_lanes()

    def _pause(self) -> None:
        """Keep the state of the lanes, whose trials may continue."""
        self._drop_ended_lanes()
        with contextlib.suppress(ClientStateLostError):  # then they start again at round 0
            keys = {trial.key: trial.full_key for trial in self.trials}
            self._paused = list(keys.values()), self._serialized(self._client_states(), keys)

    def paused(self) -> tuple[list[str], bytes] | None:
        """The lanes of a pack that stopped early: the full keys of their trials, and their state."""
        return self._paused

    def _drop_ended_lanes(self) -> None:
        keep = [i for i, trial in enumerate(self.trials) if self._results[trial.key].state == "running"]
        if len(keep) == len(self.trials):
            return
        self._flush_metrics()
        self._work = select_lanes(self._work, keep)
        groups: list[LaneGroup] = []
        states: list[State] = []
        for group, state in zip(self._groups, self._states, strict=True):
            members = [i - group.start for i in keep if group.start <= i < group.stop]
            if not members:
                continue
            start = groups[-1].stop if groups else 0
            hypers = {
                name: value[members] if isinstance(value, torch.Tensor) else value
                for name, value in group.hypers.items()
            }
            groups.append(LaneGroup(group.method, start, start + len(members), hypers))
            states.append({name: value[members] for name, value in state.items()})
        self._use_groups(groups)
        self._states = states
        self.theta = self.theta[keep]
        self.trials = [self.trials[i] for i in keep]

    # ---- checkpoints

    def checkpoint(self) -> bytes:
        """Everything needed to resume from here: plain tensors and numbers, no code."""
        until = self.t
        while True:
            try:
                clients = self._client_states()
                break
            except ClientStateLostError:
                self._rewind()
                self.progress(until)
        self._last_checkpoint = self._serialized(clients, {key: key for key in self.results})
        return self._last_checkpoint

    def _serialized(self, clients: ClientStates | None, keys: Mapping[str, str]) -> bytes:
        """`keys`: maps the trial key of every result to include to the key that is written instead."""
        buffer = io.BytesIO()
        torch.save(
            {
                "t": self.t,
                "lanes": [keys[trial.key] for trial in self.trials],
                "groups": [group.stop - group.start for group in self._groups],
                "theta": self.theta.cpu(),
                "centre": None if self._work.centre is None else torch.from_numpy(self._work.centre),
                "length": None if self._work.length is None else torch.from_numpy(self._work.length),
                "states": [{name: v.cpu() for name, v in state.items()} for state in self._states],
                "results": {
                    keys[k]: {**vars(r), "correct": r.correct.hex()} for k, r in self.results.items() if k in keys
                },
                "clients": vars(clients) if clients else None,
            },
            buffer,
        )
        return buffer.getvalue()

    def _client_states(self) -> ClientStates | None:
        if not self._work.program.stateful or self.t == 0:
            return None
        # hosts beyond the assignment may still hold the clients of another pack
        return ClientStates.merge(self.hosts.states()[: len(self._work.assignment)], self.t)

    def _restore(self, checkpoint: bytes) -> ClientStates | None:
        """Restore the lanes of this pack, and return the states of its clients. The checkpoint may have further lanes:
        the parts of a split pack resume from the same checkpoint."""
        saved: dict[str, Any] = torch.load(io.BytesIO(checkpoint), weights_only=True)
        keys = {trial.key for trial in self.trials}
        if not keys <= set(saved["results"]):
            raise ValueError("the checkpoint belongs to another pack")
        self._results = {
            key: LaneResult(**{**fields, "correct": bytes.fromhex(fields["correct"])})
            for key, fields in saved["results"].items()
            if key in keys
        }
        check_round(saved["t"], self.rounds)
        check_results(list(self._results.values()), saved["t"])
        check_weights(saved, self._work, self.theta)
        self._drop_ended_lanes()
        saved_lane = {key: index for index, key in enumerate(saved["lanes"])}
        if any(trial.key not in saved_lane for trial in self.trials):
            raise ValueError("the checkpoint belongs to another pack")
        index = [saved_lane[trial.key] for trial in self.trials]
        self.t = saved["t"]
        self.theta = saved["theta"][index].to(self.device)
        if saved["centre"] is not None:
            self._work = replace(self._work, centre=saved["centre"][index].numpy())
        if saved["length"] is not None:
            self._work = replace(self._work, length=saved["length"][index].numpy())
        self._states = []
        for group in self._groups:
            state = continuation.group_state([saved], [(0, lane) for lane in index[group.lanes]])
            self._states.append({name: value.to(self.device) for name, value in state.items()})
        return ClientStates(**saved["clients"]) if saved["clients"] else None


@contextlib.contextmanager
def _unusable_checkpoints() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a checkpoint may contain anything
        if is_out_of_memory(error):
            raise
        raise UnusableCheckpointError(f"{type(error).__name__}: {error}") from error


def run_pack(trials: Sequence[TrialSpec], data: ProblemData, device: str = "cpu") -> dict[str, LaneResult]:
    """Run a whole pack in this process."""
    server = Server(Hosts(1, device), device)
    server.open(trials, data)
    server.advance(server.rounds)
    return server.results
