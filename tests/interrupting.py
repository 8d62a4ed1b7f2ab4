"""A view that stops a sweep after a pack, as Ctrl-C does."""

from orchestrator.execution.progress import View


class StopAfterAPack(View):
    def changed(self, scheduler):
        scheduler.stopping = scheduler.stopping or (bool(scheduler.lane_rounds) and not scheduler.in_flight)
