"""A slot: a Ray Tune trial that owns one federation and runs one pack after the other.

Tune gives the slot its placement group and restarts it if it dies. Packs come from the desk, and reports go there; Tune
knows nothing about them.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import tune

from trainables import code_identity
from trainables.code_identity import CodeIdentity, OtherCodeError
from trainables.federation.checkpoints import PackStorage
from trainables.federation.memory_errors import is_out_of_memory
from trainables.federation.messages import Report
from trainables.federation.pack_runner import Federation, PackRunner
from trainables.ray_actors.desk import Pace
from trainables.ray_actors.errors import NodeExcludedError, NotStartedError, one_line, original

HAND_BACK_AGAIN_S = 3.0  # until the next attempt, after a checkpoint could not be written


class PackSlot(tune.Trainable):
    def setup(
        self,
        config: dict[str, Any],
        desk: Any,
        start: Callable[[], Federation],
        storage: PackStorage,
        code: CodeIdentity | None = None,
    ) -> None:
        """`start`: starts the federation. `code`: the identity that this process must have; default: not checked."""
        self._desk, self._start = desk, start
        self._slot, self._node = config["slot"], ray.get_runtime_context().get_node_id()
        self._packs = 0
        self._start_error: Exception | None = None
        """Raised by the first step, because Ray keeps only the text of an error in an actor's constructor."""
        self._closed = threading.Event()
        self._advice: tuple[int, str] = (0, "")
        """The pack that ran at the last heartbeat, and what the desk said to do with it."""
        self._pace = Pace.of(1)
        self._unsent: Report | None = None
        """The latest report about the pack's progress, for the next heartbeat."""
        self._last: Report | None = None
        """The final report about the last pack, for the next request."""
        self._lock = threading.Lock()
        """Guards `_unsent`."""
        self._next_hand_back = 0.0
        """The time before which the pack is not handed back."""
        self._references: set[Any] = set()
        """References to the data of all packs so far. If one thread drops the last reference to an object in this
        process while another thread receives a new one, Ray can lose the object: a call with that argument is then
        never sent. These references keep nothing alive that the driver would not keep anyway."""
        try:
            if code is not None:
                code_identity.check(code, code_identity.package_identity(), self._node)
            self.runner = PackRunner(self._slot, start(), storage)
        except Exception as error:  # a federation may fail in any way
            self._start_error = self._with_node(error)
            return
        threading.Thread(target=self._send_heartbeats, name="fedsweep-heartbeat", daemon=True).start()

    def _with_node(self, error: BaseException) -> Exception:
        """The error with the node at fault; by default the slot's node."""
        error = original(error)
        if isinstance(error, OtherCodeError):
            return error
        return NotStartedError(one_line(error), getattr(error, "node", "") or self._node)

    @property
    def _nodes(self) -> list[str]:
        """The nodes of the slot and its federation, the slot's own first."""
        return [self._node, *getattr(self.runner.federation, "nodes", ())]

    @property
    def _device_and_code(self) -> tuple[str, str]:
        """The model of the federation's GPUs, and the digest of its code."""
        federation = self.runner.federation
        return getattr(federation, "accelerator", ""), getattr(federation, "code", "")

    def _send_heartbeats(self) -> None:
        """Send heartbeats, also during a long round. A suspended process sends none."""
        while not self._closed.wait(self._pace.heartbeat_s):
            with contextlib.suppress(Exception):  # the driver notices that the desk is lost
                order = self.runner.order
                answer = self._desk.alive.remote(self._slot, self._nodes, self._with_unsent(None))
                advice, self._pace = ray.get(answer, timeout=60)
                self._advice = (order.number if order else 0, advice)

    def _with_unsent(self, report: Report | None) -> Report | None:
        """This report, with the notes of the unsent report. If this report is None: the unsent report."""
        with self._lock:
            unsent, self._unsent = self._unsent, None
        if report is None or unsent is None:
            return report or unsent
        return replace(report, notes=(*unsent.notes, *report.notes))

    def step(self) -> dict[str, Any]:
        """Run packs for about `Pace.step_s` seconds."""
        if self._start_error is not None:
            raise self._start_error
        end, timeout = time.monotonic() + self._pace.step_s, self._pace.idle_s
        while True:
            if self.runner.order is None:
                last, self._last = self._last, None
                request = self._desk.take.remote(self._slot, self._nodes, timeout, *self._device_and_code, last)
                order = ray.get(request)
                if order is None:
                    break
                if order == "leave":
                    raise NodeExcludedError
                self._references.add(order.data)
                self.runner.start(replace(order, trials=pickle.loads(order.trials)))
            assert self.runner.order is not None
            pack, advice = self._advice
            if advice == "drop" and pack == self.runner.order.number:
                self._last = self.runner.drop()
            elif advice == "hand back" and time.monotonic() > self._next_hand_back:
                self._hand_back()
            else:
                self._advance()
            timeout = 0.0  # a slot that ended its pack and finds no other returns, which wakes the driver
            if time.monotonic() > end and self._last is None:
                break
        return {"packs": self._packs}

    def _hand_back(self) -> None:
        """Hand the pack back with a checkpoint. If none can be written, the pack runs on: it may end before its node
        leaves, and writing is tried again later."""
        report = self.runner.hand_back()
        if report is None:
            self._next_hand_back = time.monotonic() + HAND_BACK_AGAIN_S
        self._last = report

    def _advance(self) -> None:
        report: Report | None
        try:
            report = self.runner.advance()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # new processes: the memory of the old ones may be fragmented, or a CUDA graph half recorded
            self.runner.federation.close()
            self.runner.federation = self._start()
            report = self.runner.too_large(len(self.runner.trials) // 2)
        if report is None:
            return
        report = self._with_unsent(report)
        assert report is not None
        if self.runner.order is not None:
            with self._lock:
                self._unsent = report
            return
        self._packs += report.kind == "ended"
        self._last = report

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: packs have their own checkpoints, which outlive the slot."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing."""

    def cleanup(self) -> None:
        self._closed.set()
        if self._start_error is None:
            self.runner.federation.close()
