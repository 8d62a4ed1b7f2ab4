"""Which data sets are about the same records.

Data files prepared from the same records have different content. They belong together if their `records` name is the
same. Without a name, the name of the data file stands for its records, and equal content is recognised by its hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.study.study import Study


def same_records(tags: Sequence[Iterable[str]]) -> list[int]:
    """The group of every item: items that share a tag are in one group, numbered by its first item."""
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
