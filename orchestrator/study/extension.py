"""Whether a changed study may go on in the folder of an old one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.study.settings import Study
from trainables.errors import UserError


def check_extension(old: Study, new: Study) -> None:
    """A result folder takes a changed study only if it adds to the old one: everything shown before is shown still."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for study in (before, after):
        for free in ("resources", "description", "compare_to"):
            del study[free]
        for data in study["data"]:
            # a file may move; that its content is the same is checked by its hash
            data["source"] = Path(data["source"]).stem if data["source"].endswith(".npz") else data["source"]
    _check_extension("", before, after)
    if new.search.warm_start and before["epsilons"] != after["epsilons"]:
        raise UserError(
            f"epsilons = {_short(after['epsilons'])}: with search.warm_start the folder's contests depend on "
            f"{_short(before['epsilons'])}; choose another folder"
        )


GROWING = ("data", "partitions", "methods", "epsilons", "seeds.confirm", "search.strategies", "search.select")

IN_ORDER = ("seeds.confirm", "search.strategies", "search.select")  # the first strategy gives cells their plain names


def _check_extension(path: str, before: Any, after: Any) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            _check_extension(f"{path}.{name}" if path else name, before.get(name), after.get(name))
    elif path in GROWING:
        for item in before:
            if item in after:
                continue
            for changed in after:  # the same one by its name: then say what of it is another
                if _name(item) is not None and _name(changed) == _name(item):
                    _check_extension(f"{path} {_short(item)}", item, changed)
            raise UserError(f"the folder's study has {path} {_short(item)}, the new one has not; choose another folder")
        if path in IN_ORDER and after[: len(before)] != before:
            raise UserError(f"new {path} must come after the old ones, {before}; choose another folder")
    elif before != after:
        raise UserError(
            f"the study has {path} = {_short(after)}, the folder was made with {_short(before)}; choose another folder"
        )


def _name(item: Any) -> str | None:
    """What a method or a data set goes by in tables."""
    return (item.get("label") or item.get("name") or item.get("source")) if isinstance(item, dict) else None


def carried_over(old: Study, new: Study) -> Study:
    """A study that does not say whom McNemar's test compares with keeps the folder's reference when methods join."""
    kept = old.reference.shown
    if new.compare_to or new.reference.shown == kept or kept not in [method.shown for method in new.methods]:
        return new
    return new.model_copy(update={"compare_to": kept})


def _short(value: Any) -> str:
    text = value["name"] if isinstance(value, dict) and "name" in value else value
    return repr(text) if len(repr(text)) < 80 else repr(text)[:77] + "..."
