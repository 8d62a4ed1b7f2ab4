"""Whether a changed study may continue in the results folder of an earlier one."""

from __future__ import annotations

from typing import Any

from orchestrator.study.study import Study
from trainables.errors import UserError

GROWING = ("data", "partitions", "methods", "epsilons", "seeds.confirm", "search.strategies", "search.select")
"""Lists that may get new items."""
ORDERED = ("seeds.confirm", "search.strategies", "search.select")
"""Lists that keep their order; new items are appended. For example, tables omit the name of the first strategy, so it
must stay the first."""


def check_extension(old: Study, new: Study) -> None:
    """A results folder accepts a changed study only if it adds to the old one. Labels, backbones, `records`,
    description, `compare_to` and resources may change, and `defaults` if the methods' options stay the same. A data
    file may move; its content is checked by its hash."""
    before, after = _identity(old), _identity(new)
    _check("", before, after)
    if old.budgets_depend and before["epsilons"] != after["epsilons"]:
        why = "search.warm_start" if old.search.warm_start else "a strategy that searches all budgets together"
        raise UserError(
            f"epsilons = {_short(after['epsilons'])}: with {why} the folder's trials depend on "
            f"{_short(before['epsilons'])}; choose another folder"
        )


def _identity(study: Study) -> dict[str, Any]:
    """The study without what may change freely."""
    content = study.model_dump(mode="json", exclude={"resources", "description", "compare_to", "defaults"})
    for dumped, data in zip(content["data"], study.data, strict=True):
        dumped.clear()
        dumped["source"] = data.id
    for method in content["methods"]:
        del method["label"]
    return content


def _check(path: str, before: Any, after: Any) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            _check(f"{path}.{name}" if path else name, before.get(name), after.get(name))
    elif path in GROWING:
        for item in before:
            if item in after:
                continue
            for changed in after:  # the item was changed, not removed: report the key that differs
                if _name(item) is not None and _name(changed) == _name(item) and changed not in before:
                    _check(f"{path} {_short(item)}", item, changed)
            raise UserError(f"{path} {_short(item)} is missing: the folder's study has it; choose another folder")
        if path in ORDERED and after[: len(before)] != before:
            raise UserError(f"new {path} must come after the old ones, {before}; choose another folder")
    elif before != after:
        raise UserError(
            f"the study has {path} = {_short(after)}, the folder was made with {_short(before)}; choose another folder"
        )


def _name(item: Any) -> str | None:
    return item.get("name") or item.get("source") if isinstance(item, dict) else None


def keep_reference(old: Study, new: Study) -> Study:
    """The new study with the folder's reference method, unless it names one itself. The default, the last method, would
    change when methods are added."""
    kept = next((method for method in new.methods if method.id == old.reference.id), None)
    if new.compare_to or kept is None or new.reference.id == kept.id:
        return new
    return new.model_copy(update={"compare_to": kept.shown})


def _short(value: Any) -> str:
    text = value["name"] if isinstance(value, dict) and "name" in value else value
    return repr(text) if len(repr(text)) < 80 else repr(text)[:77] + "..."
