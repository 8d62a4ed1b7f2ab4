"""Results of searches as an earlier call computed them, as JSON. They are valid as long as the digest of the trials is
the same."""

from __future__ import annotations

import base64
from array import array
from collections import Counter
from dataclasses import fields
from typing import Any

from orchestrator.results.searches import as_stored, choice_from
from orchestrator.results.winners import SearchResult


def as_plain(search: SearchResult) -> dict[str, Any]:
    return {
        **{field.name: getattr(search, field.name) for field in fields(search)},
        "choice": as_stored(search.choice),
        "seconds": base64.b64encode(array("d", search.seconds)).decode(),
    }


def from_plain(plain: dict[str, Any]) -> SearchResult:
    """Raises an error if it is damaged."""
    return SearchResult(
        choice=choice_from(plain["choice"]),
        chosen=plain["chosen"],
        by_one_seed=plain["by_one_seed"],
        found_in=tuple(plain["found_in"]),
        configurations=plain["configurations"],
        trials=plain["trials"],
        trial_rounds=plain["trial_rounds"],
        states=Counter(plain["states"]),
        axes={stage: {name: tuple(values) for name, values in axes.items()} for stage, axes in plain["axes"].items()},
        seconds=tuple(array("d", base64.b64decode(plain["seconds"]))),
        missing=plain["missing"],
        more_to_come=plain["more_to_come"],
        digest=plain["digest"],
        worst_epsilon=plain["worst_epsilon"],
    )
