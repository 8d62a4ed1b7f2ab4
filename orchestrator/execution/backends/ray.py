"""Runs a sweep on Ray. Ray Tune runs slots: Tune trials that each own a federation and fetch packs from an
actor, the desk."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Tune reads these when it is imported. Results go to the ledger, so Tune writes no logs, prints no output and saves its
# state only once a day. Its Ctrl-C handler is off. It warns only of operations that take more than a minute, and up to
# 1,000 slots may wait for their placement groups.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "86400")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_WARN_THRESHOLD_S", "60")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "1000")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayActorError
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.execution.backends.base import StopMonitor, SweepRun, scheduling, session_facts
from orchestrator.execution.cluster import head, nodes
from orchestrator.execution.cluster.connect import connected, local_resources
from orchestrator.execution.cluster.failures import failure_of
from orchestrator.execution.cluster.metrics import Metrics
from orchestrator.execution.cluster.private_folder import private_folder
from orchestrator.execution.cluster.ray_internals import (
    actor_of,
    reuse_prestarted_workers,
    session_folder,
    without_error_messages,
)
from orchestrator.execution.host_memory import within_memory
from orchestrator.execution.node_health import NodeHealth
from orchestrator.execution.packing import Capacity, cluster_capacity, smallest_federation
from orchestrator.execution.progress import View
from orchestrator.execution.scheduler import Scheduler
from orchestrator.study.settings.resources import ResourceSettings
from trainables.code_identity import code_identity
from trainables.errors import UserError
from trainables.federation.messages import Failure
from trainables.models import kernels
from trainables.models.kernel_build import kernel_build
from trainables.ray_actors.desk import Pace, PackDesk
from trainables.ray_actors.federation import start_in_slot
from trainables.ray_actors.object_store import ObjectStoreProblems
from trainables.ray_actors.slot import PackSlot

EXCHANGE_EVERY_S = 0.02  # time between two exchanges of packs and reports with the desk
CHECK_NODES_EVERY_S = 2.0
REPORT_BUSY_EVERY_S = 30.0
REPORT_WAITING_EVERY_S = 30.0
WAIT_FOR_CLUSTER_S = 900.0  # until the cluster is large enough for a federation
WAIT_FOR_NODES_S = 60.0  # for lost nodes to return, before the sweep adapts to those that are left
DESK_TIMEOUT_S = 120.0
DESKS_IN_A_ROW = 5  # the sweep stops after it has lost this many desks and no trial has ended meanwhile
MOST_SLOTS = 10_000  # concurrent calls that the desk accepts, one per slot; Ray's default is 1,000
SLOT_TIMEOUT_S = 120.0  # shortest time without a heartbeat before a slot is killed; long rounds do not delay heartbeats
SLOT_TIMEOUT_TIMES = 60.0  # the same, in heartbeat intervals, which grow with the number of slots
NODE_LABEL = "ray.io/node-id"
log = logging.getLogger("fedsweep")


class RestartError(Exception):
    """All slots must be restarted, because the cluster has changed."""


class NoRoomError(RestartError):
    """For too long, no usable node had room for a federation of this size, or none took a pack."""


class GPUsAvailableError(RestartError):
    """GPUs are available, and all packs on CPUs have ended: the sweep restarts on GPUs."""


class DeskLostError(RestartError):
    """The desk has died or does not answer. Reports that the driver had not fetched are lost."""


class RayBackend:
    """Runs a sweep on Ray. `address`: the cluster to join; by default, a local Ray is started for the run."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def check(self, resources: ResourceSettings, clients: int) -> None:
        if self._address is None:
            cluster_capacity(local_resources(), resources, clients)

    def run(self, sweep_run: SweepRun) -> None:
        """Run the sweep. Restart the slots if federations no longer fit, GPUs become available, or the desk is lost."""
        elastic = self._address is not None  # nodes may join a cluster, but not a local Ray
        prepared, health, desks = sweep_run.sweep.prepared, NodeHealth(), 0
        with connected(self._address), head.watched(sweep_run.location.leave):
            while True:
                capacity = _free_capacity(sweep_run.resources, prepared.most_clients, sweep_run.view, elastic, health)
                capacity = within_memory(capacity, sweep_run.resources, prepared.most_weights, nodes.node_resources())
                sweep_run.view.started(sweep_run.sweep, capacity)
                cluster_facts = {"nodes": str(len(nodes.node_resources())), "logs": f"{session_folder()}/logs"}
                sweep_run.sweep.ledger.begin_session({**session_facts(capacity), **cluster_facts})
                before = len(sweep_run.sweep.outcomes)
                try:
                    with sweep_run.view:
                        run_slots(sweep_run, capacity, elastic=elastic, health=health)
                    return
                except DeskLostError as error:
                    desks = desks + 1 if len(sweep_run.sweep.outcomes) == before else 0
                    if desks == DESKS_IN_A_ROW:
                        reason = str(error.__cause__).strip().partition("\n")[0]
                        died = f"the desk's process died {desks} times before a trial ended: {reason}"
                        raise UserError(f"no trial can run here: {died}") from error
                except RestartError:
                    desks = 0


def _free_capacity(
    resources: ResourceSettings, clients: int, view: View, elastic: bool, health: NodeHealth
) -> Capacity:
    """The capacity of the free resources. If no federation fits into them, the capacity is one federation, which waits
    until other jobs end."""
    there = nodes.current()
    excluded = health.blocked | there.leaving
    try:
        usable = [resources for node, resources in there.alive.items() if node not in excluded]
        total = cluster_capacity(usable, resources, clients)
    except UserError as error:
        if not elastic:
            raise
        total = _wait_for_capacity(error, resources, clients, view)
    try:
        free = cluster_capacity(nodes.free_resources(excluded), resources, clients)
    except UserError:
        return replace(total, federations=1)
    # if other jobs use all GPUs, wait for one: a CPU is slower, and its results differ in their last bits
    return free if free.size.device == total.size.device else replace(total, federations=1)


def _wait_for_capacity(missing: UserError, resources: ResourceSettings, clients: int, view: View) -> Capacity:
    """Request resources for a federation from the autoscaler, and wait until the cluster has them. `missing`: what the
    cluster lacks now."""
    began, reported = time.monotonic(), -math.inf
    with nodes.requested(smallest_federation(resources).bundles, nodes.PLACEMENT[resources.placement]):
        while True:
            if time.monotonic() - reported > REPORT_WAITING_EVERY_S:
                reported = time.monotonic()
                view.say(f"{missing}; waiting for nodes, for {WAIT_FOR_CLUSTER_S / 60:.0f} min at most")
            time.sleep(CHECK_NODES_EVERY_S)
            try:
                return cluster_capacity(nodes.node_resources(), resources, clients)
            except UserError:
                if time.monotonic() - began > WAIT_FOR_CLUSTER_S:
                    raise


def run_slots(
    sweep_run: SweepRun,
    capacity: Capacity,
    *,
    elastic: bool = False,
    start: Callable[[], Any] | None = None,
    health: NodeHealth | None = None,
) -> None:
    """Run all trials that have not ended. Returns when all have ended, or when the run was stopped. Raises a
    `RestartError` if the slots must be restarted.

    `elastic`: nodes may join the cluster. `start`: starts a slot's federation; default: a federation of Ray
    actors."""
    sweep, needs_data = sweep_run.sweep, start is None
    kernel = kernels.chosen(capacity.size.device)
    code = code_identity(kernel_build(kernel))
    if start is None:
        log.info("kernel: %s", code["kernel"])
        start = functools.partial(start_in_slot, capacity.size, kernel, sweep.prepared.study.name, code)
    # not in the results folder, which may come from a stranger and contain links
    scratch = Path(tempfile.mkdtemp(prefix="tune-", dir=private_folder()))
    problems, store = sweep.prepared.problems, ObjectStoreProblems()
    desk = _start_desk(sweep.prepared.study.name)
    with scheduling(sweep_run, capacity, health) as scheduler:
        try:
            slots = SlotSearcher(scheduler)
            callback = SweepCallback(
                sweep_run,
                scheduler,
                slots,
                desk,
                lambda key: store.reference(problems[key]) if needs_data else None,
                elastic,
            )
            slot = tune.with_parameters(
                PackSlot, desk=desk, start=start, storage=sweep_run.location.checkpoints, code=code
            )
            with quiet(), reuse_prestarted_workers():
                _tuner(slot, capacity, slots, SweepStopper(scheduler), callback, scratch).fit()
        except RestartError:
            if not scheduler.stopping:
                raise
        finally:
            with contextlib.suppress(Exception):  # if the head is lost, the desk is gone, too
                desk.close.remote()
                ray.kill(desk)
            shutil.rmtree(scratch, ignore_errors=True)
        if scheduler.moving_to_gpus and not (scheduler.stopping or sweep.finished):
            raise GPUsAvailableError


def _start_desk(study: str) -> Any:
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"fedsweep {study} {secrets.token_hex(3)} desk"
    options = {"num_cpus": 0, "scheduling_strategy": this_node, "name": name, "max_concurrency": MOST_SLOTS}
    return ray.remote(PackDesk).options(**options).remote()


# ---- components passed to Tune


class _NotPickled:
    """Tune pickles its components to restore them later. These have no state to restore: the state of a sweep is in the
    ledger."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __deepcopy__(self, memo: Any) -> _NotPickled:
        return self


class SlotSearcher(_NotPickled, Searcher):
    """Suggests slots while there is work for them. A slot that no node has room for stays pending, so that an
    autoscaler starts a node for it, and a node that joins is used."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(metric="packs", mode="max")
        self._scheduler = scheduler
        self.target = scheduler.queue.capacity.federations
        """Number of slots to suggest, if there is work for them."""
        self._suggested = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if self._scheduler.over:  # if None were returned and no slot existed, Tune would wait for ten minutes
            return Searcher.FINISHED
        if self._suggested >= self.target or not self._scheduler.can_use(self._suggested + 1):
            return None
        self._suggested += 1
        return {"slot": trial_id}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Do nothing: slots report to the desk."""

    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


class SweepStopper(_NotPickled, tune.Stopper):
    """Stops all slots at the end of the sweep, including pending ones."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._scheduler.over


class SweepCallback(_NotPickled, tune.Callback):
    """Runs between Tune's steps: exchanges packs and reports with the desk, and checks the nodes and the slots."""

    def __init__(
        self,
        sweep_run: SweepRun,
        scheduler: Scheduler,
        slots: SlotSearcher,
        desk: Any,
        data_of: Callable[[str], Any],
        elastic: bool,
    ) -> None:
        self.scheduler, self._slots, self._desk, self._data_of = scheduler, slots, desk, data_of
        self._stop_monitor, self._say, self._elastic = StopMonitor(sweep_run, scheduler), sweep_run.view.say, elastic
        self._metrics = Metrics(scheduler)
        self._desk_closed = False
        self._failed: list[tuple[str, Failure]] = []
        """Failed slots that the scheduler has not been told about."""
        self._last_heard: dict[str, float] = {}
        """When each slot sent its last message."""
        self._refused: set[str] = set()
        """Refused nodes that have been reported to the user."""
        self._exchanged = 0.0
        now = time.monotonic()
        self._checked_nodes = self._had_room = self._had_slots = self._had_takers = self._reported_busy = now
        self._had_nodes = now
        """`_had_...`: when there last was room for a federation, enough slots, slots that take packs, or a node that is
        not refused."""

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._last_heard[trial.trial_id] = time.monotonic()

    def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        failure = failure_of(trial)
        self._failed.append((trial.trial_id, failure))
        excluded = self.scheduler.health.excluded | ({failure.node} if failure.kind == "other code" else set())
        trial.update_resources(slot_resources(self.scheduler.queue.capacity, excluded))

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        now = time.monotonic()
        if not self._failed and now - self._exchanged < EXCHANGE_EVERY_S:
            return
        self._exchanged = now
        if now - self._checked_nodes >= CHECK_NODES_EVERY_S:
            self._checked_nodes = now
            running = [trial for trial in trials if trial.status == "RUNNING"]
            self._check_nodes(now, len(running))
            self.scheduler.record_stalls()
        self._stop_monitor.check()
        if self.scheduler.stopping or self.scheduler.moving_to_gpus:
            self.scheduler.withdraw(self._get(self._desk.withdraw.remote()))
        failed, self._failed = self._failed, []
        if failed:
            self._get(self._desk.forget.remote([slot for slot, _ in failed]))
        any_reports = self._exchange()
        for slot, failure in failed:
            self.scheduler.slot_failed(slot, failure)
        # after the exchange, which fetches the heartbeats that slots sent while the driver was suspended
        if self._checked_nodes == now:
            self._kill_hung_slots(now, [trial for trial in trials if trial.status == "RUNNING"])
        if failed or any_reports:  # offer at once the packs that these results allow
            self._exchange()
        if self.scheduler.over and not self._desk_closed:  # otherwise Tune would wait for the calls of idle slots
            self._desk_closed = True
            self._desk.close.remote()

    def _exchange(self) -> bool:
        """Send new packs to the desk, and handle the reports that it returns. Returns whether there were any."""
        orders = [
            replace(order, trials=pickle.dumps(order.trials), data=self._data_of(order.trials[0].problem.key))
            for order in self.scheduler.next_orders()
        ]
        health = self.scheduler.health
        superseded, self.scheduler.superseded = tuple(self.scheduler.superseded), []
        nodes = tuple(health.blocked), tuple(health.leaving)
        reports = self._get(self._desk.exchange.remote(orders, *nodes, superseded))
        now = time.monotonic()
        self._last_heard.update((report.slot, now) for report in reports)
        unpickled = [replace(report, lanes=pickle.loads(report.lanes) if report.lanes else ()) for report in reports]
        self.scheduler.receive(unpickled)
        self._metrics.update(self.scheduler)
        return bool(reports)

    def _get(self, answer: Any) -> Any:
        """The result of a call to the desk."""
        try:
            return ray.get(answer, timeout=DESK_TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            log.warning("the desk was lost; packs in flight will restart from their checkpoints")
            raise DeskLostError from error

    def _kill_hung_slots(self, now: float, running: list) -> None:
        """Kill the running slots that have sent no message for too long."""
        timeout = max(SLOT_TIMEOUT_S, SLOT_TIMEOUT_TIMES * Pace.of(len(running)).heartbeat_s)
        for trial in running:
            silence = now - self._last_heard.get(trial.trial_id, now)
            if silence > timeout:
                log.warning("a slot on %s has not sent a heartbeat for %.0f s and is killed", trial.node_ip, silence)
                self._last_heard[trial.trial_id] = now
                ray.kill(actor_of(trial))

    # ---- nodes join and leave

    def _check_nodes(self, now: float, running: int) -> None:
        """Adapt the sweep to the nodes that are there now. `running`: the number of running slots."""
        scheduler, capacity, health = self.scheduler, self.scheduler.queue.capacity, self.scheduler.health
        there = nodes.current()
        usable = [node for node, resources in there.alive.items() if capacity.can_use(resources)]
        health.update(there.names, usable, there.dead, there.leaving)
        for node in health.refused.keys() - self._refused:
            self._refused.add(node)
            self._say(f"{health.refused[node]}; the node gets no packs")
        if not health.no_node_left:
            self._had_nodes = now
        elif not self._elastic or now - self._had_nodes > WAIT_FOR_NODES_S:
            scheduler.stop_if_no_node_is_left()
        alive = [resources for node, resources in there.alive.items() if node not in health.excluded]
        possible = capacity.federations_on(alive)
        gpus_wanted = capacity.prefers_gpus and not scheduler.moving_to_gpus
        if gpus_wanted and capacity.gpu_federations_on(nodes.free_resources(health.excluded)):
            log.info("GPUs are available: the packs in flight end on CPUs, all others run on GPUs")
            scheduler.moving_to_gpus = True
        if possible:
            self._had_room = now
        elif now - self._had_room > WAIT_FOR_NODES_S and not health.no_node_left:
            if health.clear_unreliable():
                raise NoRoomError
            seconds = now - self._had_room
            log.warning("no node had room for a federation for %.0f s; the packs in flight start again", seconds)
            raise NoRoomError
        self._slots.target = max(possible, 1)
        if self._elastic:  # as many slots may be pending as are running, so that an autoscaler starts nodes for them
            self._slots.target = min(possible + max(1, running), capacity.max_federations or 2**31)
        if running >= capacity.federations or not scheduler.can_use(running + 1):
            self._had_slots = now
        waited = now - self._had_slots > WAIT_FOR_NODES_S
        federations = running if waited else max(running, capacity.federations)
        if running and federations != capacity.federations:
            log.info("%d federations run now", federations)
            scheduler.queue.resize(federations)
        if scheduler.in_flight or not scheduler.offered:
            self._had_takers = now
        elif now - self._had_takers > WAIT_FOR_NODES_S and health.clear_unreliable():
            raise NoRoomError
        if possible and not running and now - max(self._reported_busy, self._had_slots) > REPORT_BUSY_EVERY_S:
            self._report_busy(now)

    def _report_busy(self, now: float) -> None:
        free = nodes.free_resources(self.scheduler.health.excluded)
        if self.scheduler.queue.capacity.federations_on(free) or nodes.has_slots():
            return
        self._reported_busy = now
        self._say(f"the cluster is busy: no node has room for a federation, {nodes.other_jobs()}; waiting")


def slot_resources(capacity: Capacity, without: Collection[str] = ()) -> tune.PlacementGroupFactory:
    """The resources of a slot. `without`: ids of nodes on which it must not be placed."""
    options: dict[str, Any] = {}
    if without:
        selector = {NODE_LABEL: f"!in({','.join(sorted(without))})"}
        options["bundle_label_selector"] = [selector] * len(capacity.size.bundles)
    # "pack" is STRICT_PACK: Ray's PACK would spread a federation if a node has room for only a part of it
    strategy = nodes.PLACEMENT[capacity.placement]
    return tune.PlacementGroupFactory([{}, *capacity.size.bundles], strategy=strategy, **options)


def _tuner(
    slot: Any,
    capacity: Capacity,
    slots: SlotSearcher,
    stopper: SweepStopper,
    callback: SweepCallback,
    scratch: Path,
) -> tune.Tuner:
    return tune.Tuner(
        tune.with_resources(slot, slot_resources(capacity)),
        tune_config=tune.TuneConfig(
            search_alg=slots,
            num_samples=-1,
            trial_name_creator=lambda trial: f"slot_{trial.trial_id}",
            trial_dirname_creator=lambda trial: f"slot_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name="slots",
            storage_path=str(scratch.absolute()),
            stop=stopper,
            failure_config=tune.FailureConfig(max_failures=-1),  # the scheduler decides when to give up
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            callbacks=[callback],
            verbose=0,
        ),
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Ray's own messages; the important ones are in the ledger and the log."""
    logger = logging.getLogger("ray")
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        with without_error_messages():
            yield
    finally:
        level, logger.propagate, logger.handlers = before
        logger.setLevel(level)
