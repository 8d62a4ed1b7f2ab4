"""What everything that was published about the same records costs together.

    Gaussian releases                       mu-composition, exact
    Gaussian releases of secret samples     privacy loss distributions (`sampled`)
    one private search and nothing else     the best account of `private_selection`
    several searches, or with releases      Renyi divergences (`private_selection`), with all Gaussian releases

If there are both searches and secret samples, half of delta is for all releases, by privacy loss distributions, and
half for the searches alone; their eps are added. An account without credit for the samples is valid too: the smaller
eps counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainables.choices import Adjacency, Level
from trainables.privacy import sampled
from trainables.privacy.plan import MAX_SAMPLED_EPSILON
from trainables.privacy.private_selection import Search, private_searches
from trainables.privacy.sampled import Sampled

ANALYST_ONLY = "If the data are private, this is for the analyst and not for publication: no privacy budget covers it."
MODEL_MAY_BE_PUBLISHED = (
    "This file may be published at the eps of its account, which adds up with everything else published about the same "
    "records; see `fedsweep account`."
)
LABEL_FREE_PARTITIONS = ("iid", "explicit")
"""Partitions that do not depend on labels. A plug-in's partition may, so it counts as one that does."""


def simulated_note(partitions: Sequence[str]) -> str:
    """A warning about partitions that depend on labels; empty if there is none."""
    simulated = [text for text in partitions if text.partition(":")[0] not in LABEL_FREE_PARTITIONS]
    if not simulated:
        return ""
    return f"The partition {' and '.join(simulated)} is simulated from the labels, which no privacy budget covers."


@dataclass(frozen=True)
class Publication:
    """One published mechanism: a model trained with secret noise, or a private search."""

    level: Level
    adjacency: Adjacency
    releases: tuple[Sampled, ...] = ()
    searches: tuple[Search, ...] = ()


def total_epsilon(published: Sequence[Publication], level: Level, delta: float) -> float:
    """eps at delta of all of them together, for one record or one user.

    A user-level guarantee covers the user's records. A record-level guarantee says nothing about a user: inf. If some
    are for replace-one, all are counted for replace-one, which has twice the sensitivity of zero-out.
    """
    if any(level == "user" and one.level == "record" for one in published):
        return math.inf
    replaced = any(one.adjacency == "replace-one" for one in published)
    factor = 2.0 if replaced else 1.0
    releases = tuple(release for one in published for release in one.releases)
    searches = [
        search._replace(mu=2 * search.mu) if replaced and one.adjacency == "zero-out" else search
        for one in published
        for search in one.searches
    ]
    if any(release.multiplier == 0 for release in releases) or any(math.isinf(search.mu) for search in searches):
        return math.inf
    mu = math.sqrt(sum(release.count * (factor / release.multiplier) ** 2 for release in releases))
    unsampled = private_searches(searches, delta, mu)
    least = 2 * sampled.LEAST_SAMPLED_DELTA
    if all(release.rate == 1 for release in releases) or unsampled > MAX_SAMPLED_EPSILON or delta < least:
        return unsampled
    adjacency = "replace-one" if replaced else "zero-out"
    if not searches:
        return min(unsampled, sampled.epsilon_of(releases, adjacency, delta))
    divided = sampled.epsilon_of(releases, adjacency, delta / 2) + private_searches(searches, delta / 2)
    return min(unsampled, divided)
