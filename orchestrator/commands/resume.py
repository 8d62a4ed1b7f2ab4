"""`fedsweep resume`."""

from __future__ import annotations

from orchestrator.commands.options import Address, Backend, Folder, Json, Resources, Shard, StopAfter


def resume(
    folder: Folder,
    backend: Backend = "ray",
    address: Address = None,
    resource: Resources = None,
    stop_after: StopAfter = None,
    shard: Shard = None,
    json: Json = False,
) -> None:
    """Continue the study of a results folder, also after a crash."""
    from orchestrator.commands import sweep
    from orchestrator.execution.study_run import recorded_study

    loaded, text = recorded_study(folder)
    sweep.run(
        loaded,
        text,
        folder,
        backend=backend,
        address=address,
        resource=resource,
        stop_after=stop_after,
        shard=shard,
        json=json,
    )
