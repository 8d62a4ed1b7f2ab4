"""How a running sweep looks: a live view on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.console import emit_json, stderr
from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.packing import Capacity
from orchestrator.execution.sweep import Sweep

SHOW_SHARE = 0.02  # of the driver's time, at most, goes into showing how it stands


class Running(Protocol):
    """What a view reads of the conductor."""

    sweep: Sweep
    in_flight: dict[int, Any]
    lane_rounds: int
    computing_s: float
    retries: int
    stopping: bool


@dataclass(frozen=True)
class StageCount:
    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.done}/{self.total}" if self.total else "·"


@dataclass(frozen=True)
class Standing:
    """How far a sweep has come."""

    trials_done: int
    """Each counted once, whichever cells, ways and stages share it."""
    trials_total: int
    """Including stages that have not been opened yet, as far as their size is known."""
    rounds_left: int

    @classmethod
    def of(cls, sweep: Sweep) -> Standing:
        more, left = 0, 0
        for search in sweep.searches:
            left += sweep.left(search) * search.last_round(next(reversed(search.stages)))
            for stage, count in search.trials_to_come().items():
                more += count
                left += count * search.last_round(stage)
        return cls(len(sweep.known) - sweep.running, len(sweep.known) + more, left)


def stage_count(search: CellSearch, stage: str, sweep: Sweep) -> StageCount:
    """By counts that the sweep keeps: a view looks often, and there may be very many trials."""
    opened = len(search.stages.get(stage, []))
    last = next(reversed(search.stages), None)
    return StageCount(opened - (sweep.left(search) if stage == last else 0), opened)


class View:
    """The base shows nothing; it keeps the rate. The clock starts with the first result, not with Ray."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._shown = self._cost_s = 0.0
        self.every = 0.5

    def starting(self, sweep: Sweep) -> None:
        standing = Standing.of(sweep)
        left = standing.trials_total - standing.trials_done
        study = sweep.blueprint.study
        about = "" if study.trials_are_exact else "about "
        more = ", and more where a winner calls for a finer grid" if study.may_add_stages and left else ""
        self.say(f"{about}{left} trials to run{more}, {standing.trials_done} done before")

    def started(self, sweep: Sweep, size: Capacity) -> None:
        many = size.federations
        self._first = None  # with a new conductor, which counts its rounds from nothing
        self.say(
            f"{many} federation{'s' if many > 1 else ''} of {size.size.hosts} client "
            f"host{'s' if size.size.hosts > 1 else ''} on {size.size.device}, up to {size.lanes_per_pack} lanes a pack"
        )

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def changed(self, running: Running) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, running.lane_rounds)
        over = running.sweep.finished or (running.stopping and not running.in_flight)
        if now - self._shown >= max(self.every, self._cost_s / SHOW_SHARE) or over:
            self._shown = now
            self.show(running)
            self._cost_s = time.monotonic() - now

    def say(self, sentence: str) -> None:
        stderr.print(sentence)

    def show(self, running: Running) -> None:
        pass

    def rate(self, running: Running) -> float:
        """Rounds of single trials per second."""
        if self._first is None:
            return 0.0
        then, rounds = self._first
        return (running.lane_rounds - rounds) / max(1e-9, time.monotonic() - then)

    def left(self, running: Running) -> str:
        rate = self.rate(running)
        if rate == 0:
            return "?"
        seconds = Standing.of(running.sweep).rounds_left / rate
        return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


class LineView(View):
    """A line now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.every = 10.0

    def show(self, running: Running) -> None:
        standing = Standing.of(running.sweep)
        self.say(
            f"{standing.trials_done}/{standing.trials_total} trials, {self.rate(running):.0f} trial-rounds/s, "
            f"{self.left(running)} left{_trouble(running)}"
        )


class JsonView(View):
    """One JSON object a line."""

    def say(self, sentence: str) -> None:
        emit_json({"event": "message", "text": sentence})

    def show(self, running: Running) -> None:
        standing = Standing.of(running.sweep)
        emit_json(
            {
                "event": "progress",
                "trials_done": standing.trials_done,
                "trials_total": standing.trials_total,
                "trial_rounds_left": standing.rounds_left,
                "trial_rounds_per_second": self.rate(running),
                "retries": running.retries,
            }
        )


class LiveView(View):
    """Cells by stages, redrawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self._live = Live(console=stderr, auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> View:
        self._live.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, running: Running) -> None:
        standing = Standing.of(running.sweep)
        status = Text(
            f"{standing.trials_done}/{standing.trials_total} trials · {self.rate(running):.0f} trial-rounds/s · "
            f"{self.left(running)} left{_trouble(running)}"
        )
        self._live.update(Group(standing_table(running.sweep), status), refresh=True)


def _trouble(running: Running) -> str:
    retried = f" · {running.retries} packs retried" if running.retries else ""
    return retried + (" · stopping after the packs in flight" if running.stopping else "")


def standing_table(sweep: Sweep) -> Table:
    """Cells by stages with the best validation score so far."""
    begun = [{*search.stages, *search.trials_to_come()} for search in sweep.searches]
    stages = [stage for stage in sweep.blueprint.study.stages if any(stage in some for some in begun)]
    table = Table(box=None, pad_edge=False)
    table.add_column("cell")
    for stage in stages:
        table.add_column(stage, justify="right")
    table.add_column(f"best validation {sweep.blueprint.study.judged_by.short}", justify="right")
    for search in sweep.searches:
        counts = [str(stage_count(search, stage, sweep)) for stage in stages]
        table.add_row(Text(search.name), *counts, best_so_far(search, sweep))
    return table


def best_so_far(search: CellSearch, sweep: Sweep) -> str:
    """Of the configuration that leads: its mean over seeds."""
    if search.variant.strategy.publishes_only_winner or search.best.score is None:
        return "·"  # but for the winner's, no score of a private search is to be seen
    return sweep.blueprint.study.judged_by.shown(search.best.score)
