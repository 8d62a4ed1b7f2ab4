"""A federation that only waits, to measure a sweep without its computation."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import cloudpickle

# Ray's workers cannot import this module: the package does not install it, and they do not search the working
# directory.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class WaitingFederation:
    """Every pack takes the same time. The start and end of each pack are recorded in a file per process."""

    def __init__(self, seconds: float, slots: int, folder: str) -> None:
        """The first packs wait until every slot has one, so that start-up time is not measured."""
        self._seconds, self._slots, self._folder = seconds, slots, Path(folder)
        (self._folder / f"up-{os.getpid()}").touch()

    def open(self, trials: list[Any], data: Any, checkpoint: bytes | None = None, paused: Any = None) -> None:
        (self._folder / f"began-{os.getpid()}").touch()
        while len(list(self._folder.glob("began-*"))) < self._slots:
            time.sleep(0.05)
        self._trials, self._t, self._began = trials, 0, time.time()

    def paused(self) -> None:
        return None

    def lanes_that_fit(self, trials: list[Any], data: Any) -> None:
        return None

    def progress(self, until: int) -> Any:
        rounds = self._trials[0].last_round
        time.sleep(max(0.0, self._began + self._seconds * until / rounds - time.time()))
        self._t = until
        if until < rounds:
            return SimpleNamespace(running=len(self._trials), round=until, computing_s=self._seconds)
        with (self._folder / f"packs-{os.getpid()}").open("a") as out:
            out.write(json.dumps([self._began, time.time()]) + "\n")
        results = pickle.dumps([_result(trial) for trial in self._trials])
        return SimpleNamespace(running=0, round=until, computing_s=self._seconds, results=results)

    def checkpoint(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


def _result(trial: Any) -> Any:
    """The result of a trial, with a score that depends only on its key."""
    score = int(trial.key[:4], 16) / 655.36
    last = trial.last_round
    metrics = {"accuracy": {last: score}, "loss": {last: 1.0}}
    return SimpleNamespace(
        key=trial.key, state="done", rounds=last, metrics=metrics, seconds=0.1, correct=b"", reason=""
    )
