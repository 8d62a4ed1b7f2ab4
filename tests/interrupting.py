"""Runs that stop after a pack, as with Ctrl-C."""

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.study.reading import as_text


class StopAfterAPack(View):
    def changed(self, scheduler):
        scheduler.stopping = scheduler.stopping or (bool(scheduler.lane_rounds) and not scheduler.in_flight)


def tables_whole_and_interrupted(of, folder):
    """The files of a study's tables after one run on the local backend, and after runs that stop after every pack."""

    def run(name, view):
        return study_run.run(of, as_text(of), folder / name, view, backend="local")

    assert run("whole", View()).complete
    stops = 0
    while not run("part", StopAfterAPack()).complete:
        stops += 1
    assert stops > 2, "between the batches, at least"
    return [
        {file.name: file.read_bytes() for file in (folder / name / "tables").iterdir()} for name in ("whole", "part")
    ]
