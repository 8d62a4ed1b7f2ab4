"""Which data sets are about the same records.

Data files prepared from the same records may have different content. They belong together if their `records` name is
the same. Without a `records` name, the name of the data file is used. Data sets with the same content hash always
belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.study.study import Study


def same_records(tags: Sequence[Iterable[str]]) -> list[int]:
    """The group of every item, as the index of the group's first item. Items that share a tag, directly or through
    other items, are in one group."""
    group = list(range(len(tags)))
    seen: dict[str, int] = {}
    for item, own in enumerate(tags):
        for tag in own:
            old, new = sorted((group[seen.setdefault(tag, item)], group[item]))
            group = [old if number == new else number for number in group]
    return group


def records_of(study: Study, fingerprints: Mapping[str, str]) -> dict[str, int]:
    """By data set, the group of records it belongs to: data sets with the same `records` name or content share one."""
    tags = [filter(None, (data.records or data.id, fingerprints.get(data.id))) for data in study.data]
    return dict(zip([data.id for data in study.data], same_records([list(own) for own in tags]), strict=True))
