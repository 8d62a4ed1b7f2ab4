"""Results of searches as an earlier call computed them, as JSON. They are valid as long as the digest of the trials is
the same."""

from __future__ import annotations

import base64
from array import array
from collections import Counter
from dataclasses import fields
from typing import Any

from orchestrator.results.searches import as_stored, choice_from
from orchestrator.results.winners import KnownSearch, SearchResult


def as_plain(known: KnownSearch) -> dict[str, Any]:
    search = known.search
    return {
        **{field.name: getattr(search, field.name) for field in fields(search)},
        "choice": as_stored(search.choice),
        "seconds": base64.b64encode(array("d", search.seconds)).decode(),
        "digest": known.digest,
        "missing": known.missing,
        "more_to_come": known.more_to_come,
    }


def from_plain(plain: dict[str, Any]) -> KnownSearch:
    """Raises an error if it is damaged."""
    return KnownSearch(
        plain["digest"],
        SearchResult(
            choice=choice_from(plain["choice"]),
            chosen=plain["chosen"],
            by_one_seed=plain["by_one_seed"],
            found_in=tuple(plain["found_in"]),
            configurations=plain["configurations"],
            trials=plain["trials"],
            trial_rounds=plain["trial_rounds"],
            states=Counter(plain["states"]),
            axes={
                stage: {name: tuple(values) for name, values in axes.items()} for stage, axes in plain["axes"].items()
            },
            seconds=tuple(array("d", base64.b64decode(plain["seconds"]))),
            worst_epsilon=plain["worst_epsilon"],
        ),
        plain["missing"],
        plain["more_to_come"],
    )
