"""The time of each phase of a sweep, from the command to the tables: python -m benchmarks.seconds STUDY [FOLDER]

Then similar rounds run in one process, which waits for the device after each part of a round to time the parts. So the
parts do not overlap, and add up to more than a whole round.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from orchestrator.bench.clock import Clock
from orchestrator.execution import study_run
from orchestrator.execution.packing import AUTO_LANES
from orchestrator.study import reading
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.federation.pack import pack_group
from trainables.federation.problem import ProblemData
from trainables.lazy import torch

ROUNDS = 20


def whole(study: Study, text: str, folder: Path) -> None:
    clock, write_tables = Clock(), study_run.write_tables

    def timed_tables(*arguments: Any, **options: Any) -> Any:
        clock.mark("rounds and the driver's work during them, end of Ray")
        return write_tables(*arguments, **options)

    clock.mark("imports of Python and Ray")
    with mock.patch.object(study_run, "write_tables", timed_tables):
        finished = study_run.run(study, text, folder, clock)
    clock.mark("tables")
    before = 0.0
    for what, at in clock.marks.items():
        print(f"{at - before:7.1f} s  {what}")
        before = at
    rounds = clock.computing_s / clock.federations
    print(f"{before:7.1f} s  in total, {rounds:.1f} s of them in rounds; complete: {finished.complete}")


# ---- the parts of a round


class Parts:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, owner: Any, name: str, what: str) -> Iterator[None]:
        """Time all calls of a function, each until the device has finished."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed_call(*arguments: Any, **options: Any) -> Any:
            _synchronise()
            start = time.perf_counter()
            result = function(*arguments, **options)
            _synchronise()
            self.seconds[what] += time.perf_counter() - start
            return result

        with mock.patch.object(owner, name, timed_call):
            yield


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parts_of_rounds(study: Study) -> None:
    """Time the parts of a round for the first coarse pack of every method."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepared = PreparedStudy.prepare(study)
    for cell in {cell.method.name: cell for cell in reversed(prepared.cells)}.values():
        grid, rounds = cell.space.grid(cell.space.coarse), study.stage_rounds(cell.method).coarse
        trials = [trial for point in grid for trial in cell.trials(point, study.seeds.search, rounds)]
        trials = [trial for trial in trials if pack_group(trial) == pack_group(trials[0])][: AUTO_LANES[device]]
        _parts_of(trials, prepared, device)


def _parts_of(trials: list[Any], prepared: PreparedStudy, device: str) -> None:
    # imported late: the driver of a sweep does not need them
    from trainables.federation.client_host import ClientHost
    from trainables.federation.hosts import Hosts
    from trainables.federation.lane_vectors import LaneVectors
    from trainables.federation.server import Server
    from trainables.models import recorded
    from trainables.models.softmax import SoftmaxHead

    data = ProblemData.of(prepared.problems[trials[0].problem.key])
    recorded.SMALL_LANES = 0  # parts of a recording cannot be timed
    plain = Server(Hosts(1, device), device)
    plain.open(trials, data)
    plain.advance(3)
    _synchronise()
    start = time.perf_counter()
    plain.advance(3 + ROUNDS)
    _synchronise()
    whole_s, parts = time.perf_counter() - start, Parts()
    server = Server(Hosts(1, device), device)
    server.open(trials, data)
    server.advance(3)
    with (
        parts.timed(LaneVectors, "_normals", "noise"),
        parts.timed(SoftmaxHead, "evaluate", "evaluation"),
        parts.timed(type(server._groups[0].method), "step", "server's step"),
        parts.timed(ClientHost, "round", "hosts, including noise"),
    ):
        server.advance(3 + ROUNDS)
    by_part = ", ".join(f"{what} {1e3 * seconds / ROUNDS:.2f}" for what, seconds in sorted(parts.seconds.items()))
    print(f"{trials[0].method}, {len(trials)} lanes: {1e3 * whole_s / ROUNDS:.2f} ms per round; parts: {by_part}")


def main() -> None:
    study, text = reading.load(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()) / "r"
    whole(study, text, folder)
    parts_of_rounds(study)


if __name__ == "__main__":
    main()
