"""A slot: a Ray Tune trial that owns one federation and runs one pack after the other.

Tune gives the slot its placement group and restarts it if it dies. Packs come from the desk, and reports go there; Tune
knows nothing about them.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import tune

from trainables.federation.checkpoints import PackStorage
from trainables.federation.messages import Report
from trainables.federation.pack_runner import Federation, PackRunner, is_out_of_memory

STEP_S = 1.0  # target duration of a Tune step; every step costs the driver a few milliseconds
IDLE_S = 2.0  # how long a slot without a pack waits at the desk per step


class PackSlot(tune.Trainable):
    def setup(self, config: dict[str, Any], desk: Any, start: Callable[[], Federation], storage: PackStorage) -> None:
        self._desk, self._start = desk, start
        self._slot, self._node = config["slot"], ray.get_runtime_context().get_node_id()
        self._packs = 0
        self.runner = PackRunner(self._slot, start(), storage)

    def step(self) -> dict[str, Any]:
        """Run packs for about a second."""
        end, timeout = time.monotonic() + STEP_S, IDLE_S
        while True:
            if self.runner.order is None:
                order = ray.get(self._desk.take.remote(self._slot, self._node, timeout))
                if order is None:
                    break
                self.runner.start(replace(order, trials=pickle.loads(order.trials)))
            self._advance()
            timeout = 0.0  # a slot that ended its pack and finds no other returns, which wakes the driver
            if time.monotonic() > end:
                break
        return {"packs": self._packs}

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
        self._packs += report.kind == "ended"
        sent = self._desk.report.remote(report)
        if self.runner.order is None:
            ray.get(sent)  # before the slot asks for its next pack, or the desk would report this one as lost

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: packs have their own checkpoints, which outlive the slot."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing."""

    def cleanup(self) -> None:
        self.runner.federation.close()
