"""Reads YAML with limits: no repeated keys, no exploding aliases, and errors of one sentence that name the line."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from typing import Any

import yaml

from trainables.errors import UserError
from trainables.urls import shown, shown_url

MOST_VALUES = 200_000
"""Most values of a file with its aliases expanded: a few lines of aliases can expand to billions."""

LONGEST_SHOWN = 1 << 18  # characters; a study file has thousands
PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # the anchor and the tag of a value


def shown_yaml(text: str) -> str:
    """A YAML text for people, without the credentials of URLs. A value may be quoted, or continue on the next line."""
    nodes: dict[int, yaml.ScalarNode] = {}
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):  # the text may come from anyone
        _find_scalars(yaml.compose(text, yaml.SafeLoader) if len(text) <= LONGEST_SHOWN else None, nodes, set())
    for start, node in sorted(nodes.items(), reverse=True):
        if (safe := shown_url(node.value)) != node.value:
            end = start + len(text[start : node.end_mark.index].rstrip())
            text = text[:start] + PROPERTIES.match(text, start)[0] + json.dumps(safe) + text[end:]  # type: ignore[index]
    return shown(text)


def _find_scalars(node: Any, found: dict[int, yaml.ScalarNode], seen: set[int]) -> None:
    """Collect the scalars of a YAML tree, keyed by their position in the text."""
    if isinstance(node, yaml.ScalarNode):
        found[node.start_mark.index] = node
    elif isinstance(node, yaml.CollectionNode) and id(node) not in seen:
        seen.add(id(node))
        for item in node.value:
            for part in item if isinstance(item, tuple) else (item,):
                _find_scalars(part, found, seen)


def read_yaml(text: str, file: str) -> tuple[Any, Any]:
    """The content of a YAML text, and its root node, in which `line_of` finds lines. Every error is one sentence."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        if _count(node, file, {}) > MOST_VALUES:
            raise UserError(f"{file}: with its aliases expanded it holds more than {MOST_VALUES} values")
        _refuse_repeated_keys(node, file)
        return loader.construct_document(node), node
    except RecursionError:
        raise UserError(f"{file}: not valid YAML: it is nested without end") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date, a number of a million digits
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not valid YAML: {problem}") from None


def _count(node: Any, file: str, known: dict[int, int | None]) -> int:
    """Number of values of a node, with aliases expanded. `known`: the counts by `id` of the node; None while a
    node is being counted."""
    if id(node) not in known:
        known[id(node)] = None
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        items = itertools.chain(*inside) if isinstance(node, yaml.MappingNode) else inside
        known[id(node)] = 1 + sum(_count(item, file, known) for item in items)
    count = known[id(node)]
    if count is None:
        raise UserError(f"{file}:{node.start_mark.line + 1}: not valid YAML: an alias contains itself")
    return count


def _refuse_repeated_keys(node: Any, file: str) -> None:
    """PyYAML would silently keep the last value of a repeated key."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise UserError(f"{file}:{key.start_mark.line + 1}: {key.value!r} is given twice")
                seen.add(key.value)
            _refuse_repeated_keys(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, file)


def line_of(node: Any, location: tuple[str | int, ...]) -> int:
    """The line of the deepest part of the location that is in the file."""
    line = node.start_mark.line if node is not None else 0
    for part in location:
        if isinstance(node, yaml.MappingNode):
            entries = [(key, value) for key, value in node.value if key.value == str(part)]
            if not entries and len(node.value) == 1:  # `- dp-fedsofim: {…}`: look one level down
                node = node.value[0][1]
                entries = (
                    [(k, v) for k, v in node.value if k.value == str(part)]
                    if isinstance(node, yaml.MappingNode)
                    else []
                )
            if not entries:
                break
            key, node = entries[0]
            line = key.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1
