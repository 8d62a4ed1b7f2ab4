"""The `privacy` section."""

from __future__ import annotations

from pydantic import Field, field_validator

from orchestrator.section import Section
from trainables.privacy.plan import Adjacency, Clipping, Level, Release, known_adjacency


class PrivacyStudySettings(Section):
    """What a privacy budget guarantees; docs/privacy.md explains each option."""

    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Probability with which the guarantee may fail."""
    clip: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """l2 bound on the contribution of a record, or of a user."""
    clipping: Clipping = "plain"
    """How a gradient g is brought to the bound C. plain: gradients longer than C are scaled to C. automatic: every
    gradient is scaled to C g / (‖g‖ + 0.01). adaptive (user level): C starts at `clip` and follows the median norm of
    the users' updates, which is released with them."""
    secret_participation: float = Field(default=1.0, gt=0, le=1)
    """Probability with which a user takes part in a round, known to that user alone; needs `level: user` and
    `release: secure-aggregation`."""
    release: Release = "local"
    """What an attacker sees: every client's own release (local), or only their sum (secure-aggregation)."""
    adjacency: Adjacency = "replace-one"
    """How neighbouring data sets differ."""
    level: Level = "record"
    """What is protected: one record, or a user (client) with all its records."""

    _known = field_validator("adjacency", mode="before")(known_adjacency)
