"""A pack as a Ray Tune trial.

The trial process holds a federation inside its own placement group and keeps it: Tune hands it the next pack through
`reset_config`, and shards, hosts and server stay where they are. A step runs to the next evaluation.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.train._internal.session import _TrainingResult
from ray.tune.result import SHOULD_CHECKPOINT

from trainables.federation import Federation, FederationSize
from trainables.models.kernels import Kernel
from trainables.models.lanes import SHAPES
from trainables.pack_storage import PackStorage
from trainables.problem import Shipment
from trainables.server import Progress
from trainables.spec import TrialSpec
from trainables.stopping import companies, lanes_to_stop

SNAPSHOT = "pack.snapshot"
CHECKPOINT_EVERY_S = 10.0  # a pack that dies loses about this much; a checkpoint costs a twentieth of a second


class PackTrial(tune.Trainable):
    def setup(
        self,
        config: dict[str, Any],
        shipments: dict[str, Shipment],
        size: FederationSize,
        storage: PackStorage,
        kernel: Kernel | None = None,
    ) -> None:
        self.shipments, self.storage = shipments, storage
        self._notes: list[str] = []
        """What went wrong and was got over since the last step, for the driver's log."""
        self._size, self._kernel = size, kernel
        self.federation = self._start()
        self._open(config)

    def _start(self) -> Federation:
        return Federation(self._size, ray.util.get_current_placement_group(), self._kernel)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._open(new_config)
        return True

    def _open(self, config: dict[str, Any], snapshot: bytes | None = None) -> None:
        self.trials: list[TrialSpec] = config["trials"]
        self.t = 0
        self._opened_with = snapshot
        self._opened = False
        self._saved = time.monotonic()

    def _ensure_open(self) -> None:
        """Only when the first step comes is it known whether a snapshot is to be restored."""
        if not self._opened:
            shipment = self.shipments[self.trials[0].problem.key]
            self.federation.open(self.trials, shipment, self._opened_with)
            self._opened = True

    def step(self) -> dict[str, Any]:
        fits = self._fitting()
        if fits is not None and fits < len(self.trials):
            return self._too_large(fits)
        first = self.trials[0]
        until = min((self.t // first.evaluate_every + 1) * first.evaluate_every, first.rounds)
        try:
            self._ensure_open()
            progress = self.federation.progress(until)
        except torch.OutOfMemoryError:
            # new processes: in the old ones memory may be in pieces, or a recording half made
            self.federation.close()
            self.federation = self._start()
            self._open(self.config)
            return self._too_large(len(self.trials) // 2)
        self.t = until
        if progress.running and any(trial.stop_rule for trial in self.trials):
            progress = self._stop_some()
        done = progress.running == 0
        result: dict[str, Any] = {
            "round": self.t,
            "running": progress.running,
            "done": done,
            "lanes": [vars(lane) for lane in self.federation.advance(self.t)] if done else None,
            "computing_s": progress.computing_s,
            "notes": self._notes,
        }
        self._notes = []
        if not done and time.monotonic() - self._saved > CHECKPOINT_EVERY_S and self._can_save:
            result[SHOULD_CHECKPOINT] = True
        return result

    def _stop_some(self) -> Progress:
        """The lanes that their rule ends here."""
        stop = lanes_to_stop(self.trials, self.federation.advance(self.t), self.t)
        if stop:
            self.federation.stop_lanes(stop)
        return self.federation.progress(self.t)

    def _fitting(self) -> int | None:
        """How many lanes the GPU has memory for; None where that is no question, or no more."""
        if self._opened or self._size.device != "cuda" or len(companies(self.trials)) == 1:
            return None
        first = self.trials[0]
        fits = self.federation.lanes_that_fit(first, self.shipments[first.problem.key])
        # an estimate; whether even a block of lanes, which is always computed whole, is too much is seen by trying
        return max(SHAPES["cuda"].lanes, fits) if fits is not None else None

    def _too_large(self, fits: int) -> dict[str, Any]:
        """Nothing was computed: whoever gave the pack is to make it smaller."""
        notes, self._notes = self._notes, []
        return {"round": 0, "running": 0, "done": True, "lanes": None, "fits": fits, "notes": notes}

    # ---- checkpoints

    @cached_property
    def _can_save(self) -> bool:
        """Another node may not see the driver's folder: a pack that dies there starts again from round 0."""
        return self.storage.within_reach()

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """A checkpoint that finds no room costs time if the pack should die, but no reason to let it die now."""
        self._saved = time.monotonic()
        try:
            # in Ray's own folder, where a process that is killed just now leaves nothing that is ours to remove
            with tempfile.TemporaryDirectory(prefix="fedsweep-checkpoint-", dir=self.logdir) as folder:
                return super().save(checkpoint_dir or folder)
        except OSError as error:
            self._notes.append(f"pack of {len(self.trials)} trials could not leave a checkpoint: {error}")
            return _TrainingResult(checkpoint=None, metrics={})

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self._ensure_open()
        body = self.t.to_bytes(8, "little") + self.federation.snapshot()
        with (Path(checkpoint_dir) / SNAPSHOT).open("wb") as out:
            out.write(zlib.crc32(body).to_bytes(4, "little") + body)
            out.flush()
            os.fsync(out.fileno())

    def restore(self, checkpoint_path: Any) -> None:
        try:
            super().restore(checkpoint_path)
        except (OSError, ValueError) as error:
            self._open(self.config)
            self._notes.append(f"pack of {len(self.trials)} trials starts again from round 0: no checkpoint: {error}")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self._open(self.config, None)
        content = (Path(checkpoint_dir) / SNAPSHOT).read_bytes()
        body = content[4:]
        if len(body) < 8 or zlib.crc32(body) != int.from_bytes(content[:4], "little"):
            self._notes.append(
                f"pack of {len(self.trials)} trials starts again from round 0: its checkpoint is damaged"
            )
            return
        self.t = int.from_bytes(body[:8], "little")
        self._opened_with = body[8:]

    def cleanup(self) -> None:
        self.federation.close()
