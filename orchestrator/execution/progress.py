"""Views of a running sweep: live on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.console import emit_json, printable, stderr
from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.packing import Capacity
from orchestrator.execution.scheduler import Scheduler
from orchestrator.execution.sweep import Sweep

SHOW_SHARE = 0.02  # largest share of the driver's time that is spent on the view
RECENT_S = 60.0  # the rate is measured over this time, because the load of a machine changes
OTHER_LINES = 6  # lines of the terminal that the table of cells does not use


@dataclass(frozen=True)
class StageCount:
    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.done}/{self.total}" if self.total else "·"


@dataclass(frozen=True)
class SweepProgress:
    trials_done: int
    """Trials that have ended. A trial that several cells, variants or stages share counts once."""
    trials_total: int
    """Including stages that have not started, as far as their size is known."""
    rounds_left: int
    """All rounds of the trials that have not ended, also in stages that have not started. A trial that several searches
    wait for counts once per search."""

    @classmethod
    def of(cls, sweep: Sweep) -> SweepProgress:
        to_come, rounds = 0, 0
        for search in sweep.searches:
            if search.stages:
                rounds += sweep.left(search) * search.last_round(next(reversed(search.stages)))
            for stage, count in search.trials_to_come().items():
                to_come += count
                rounds += count * search.last_round(stage)
        return cls(len(sweep.known) - sweep.unfinished, len(sweep.known) + to_come, rounds)


def stage_count(search: CellSearch, stage: str, sweep: Sweep) -> StageCount:
    """How many trials of a stage have ended. Uses counts that the sweep maintains, because views are updated often and
    a sweep may have very many trials."""
    opened = len(search.stages.get(stage, []))
    last = next(reversed(search.stages), None)
    return StageCount(opened - (sweep.left(search) if stage == last else 0), opened)


class View:
    """The base class prints only messages. It measures the rate over the last minute; the measurement starts with the
    first report of progress, so the rate excludes start-up."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()
        """(time, trial-rounds computed until then), oldest first."""
        self._shown = self._cost_s = 0.0
        """When `show` was last called, and how long that call took."""
        self.every = 0.5
        """Shortest time between two calls of `show`, in seconds."""

    def starting(self, sweep: Sweep) -> None:
        progress = SweepProgress.of(sweep)
        left = progress.trials_total - progress.trials_done
        study = sweep.prepared.study
        about = "" if study.trials_are_exact else "about "
        more = ", and more where a winner calls for a finer grid" if study.may_add_stages and left else ""
        self.say(f"{about}{left} trials to run{more}, {progress.trials_done} done before")

    def started(self, sweep: Sweep, capacity: Capacity) -> None:
        count, size = capacity.federations, capacity.size
        self._recent.clear()  # a new scheduler counts rounds from 0
        self.say(
            f"{count} federation{'s' if count > 1 else ''} of {size.hosts} client host{'s' if size.hosts > 1 else ''} "
            f"on {size.device}, up to {capacity.lanes_per_pack} lanes per pack"
        )

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def changed(self, scheduler: Scheduler) -> None:
        now = time.monotonic()
        if not self._recent or now - self._recent[-1][0] >= 0.5:
            self._recent.append((now, scheduler.lane_rounds))
        while len(self._recent) > 1 and self._recent[1][0] <= now - RECENT_S:
            self._recent.popleft()
        if now - self._shown >= max(self.every, self._cost_s / SHOW_SHARE) or scheduler.over:
            self._shown = now
            self.show(scheduler)
            self._cost_s = time.monotonic() - now

    def say(self, sentence: str) -> None:
        stderr.print(sentence)

    def show(self, scheduler: Scheduler) -> None:
        pass

    def rate(self, scheduler: Scheduler) -> float:
        """Trial-rounds per second."""
        if not self._recent:
            return 0.0
        began, rounds = self._recent[0]
        return (scheduler.lane_rounds - rounds) / max(1e-9, time.monotonic() - began)

    def left(self, progress: SweepProgress, scheduler: Scheduler) -> str:
        """Estimated time until the sweep ends, as text."""
        rate = self.rate(scheduler)
        if rate == 0:
            return "?"
        seconds = progress.rounds_left / rate
        return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


class LineView(View):
    """Prints a line every ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.every = 10.0

    def show(self, scheduler: Scheduler) -> None:
        progress = SweepProgress.of(scheduler.sweep)
        self.say(
            f"{progress.trials_done}/{progress.trials_total} trials, {self.rate(scheduler):.0f} trial-rounds/s, "
            f"{self.left(progress, scheduler)} left{_warnings(scheduler)}"
        )


class JsonView(View):
    """Prints one JSON object per line."""

    def say(self, sentence: str) -> None:
        emit_json({"event": "message", "text": sentence})

    def show(self, scheduler: Scheduler) -> None:
        progress = SweepProgress.of(scheduler.sweep)
        emit_json(
            {
                "event": "progress",
                "trials_done": progress.trials_done,
                "trials_total": progress.trials_total,
                "trial_rounds_left": progress.rounds_left,
                "trial_rounds_per_second": self.rate(scheduler),
                "retries": scheduler.retries,
            }
        )


class LiveView(View):
    """Shows a table of cells by stages, redrawn in place."""

    def __init__(self, console: Console = stderr) -> None:
        super().__init__()
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> View:
        self._live.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, scheduler: Scheduler) -> None:
        progress = SweepProgress.of(scheduler.sweep)
        status = Text(
            f"{progress.trials_done}/{progress.trials_total} trials · {self.rate(scheduler):.0f} trial-rounds/s · "
            f"{self.left(progress, scheduler)} left{_warnings(scheduler)}"
        )
        rows = max(1, self._live.console.height - OTHER_LINES)
        self._live.update(Group(progress_table(scheduler.sweep, rows), status), refresh=True)


def _warnings(scheduler: Scheduler) -> str:
    retried = f" · {scheduler.retries} packs retried" if scheduler.retries else ""
    return retried + (" · stopping after the packs in flight" if scheduler.stopping else "")


def progress_table(sweep: Sweep, rows: int | None = None) -> Table:
    """Cells by stages with the best validation score so far. `rows`: the most rows to show; if there are more cells,
    those with unfinished trials come first."""
    searches = sweep.searches
    begun = {stage for search in searches for stage in (*search.stages, *search.trials_to_come())}
    stages = [stage for stage in sweep.prepared.study.stages if stage in begun]
    table = Table(box=None, pad_edge=False)
    table.add_column("cell")
    for stage in stages:
        table.add_column(stage, justify="right")
    table.add_column(f"best validation {sweep.prepared.study.objective_spec.short}", justify="right")
    if rows is not None and len(searches) > rows:
        searches = sorted(searches, key=lambda search: not sweep.left(search))[: rows - 1]
    for search in searches:
        counts = [str(stage_count(search, stage, sweep)) for stage in stages]
        table.add_row(Text(printable(search.name)), *counts, best_so_far(search, sweep))
    if others := len(sweep.searches) - len(searches):
        table.add_row(f"… and {others} other searches")
    return table


def best_so_far(search: CellSearch, sweep: Sweep) -> str:
    """The mean score over seeds of the best configuration so far."""
    if search.variant.strategy.publishes_only_winner or search.best.score is None:
        return "·"  # of a private search, only the winner's score may be published
    return sweep.prepared.study.objective_spec.format(search.best.score)
