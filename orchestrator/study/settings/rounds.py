"""The `rounds` section."""

from __future__ import annotations

from pydantic import Field

from orchestrator.section import Section


class RoundSettings(Section):
    """Federated rounds of a trial, by stage."""

    coarse: int = Field(default=50, ge=1, le=10**6)
    """Rounds of the coarse grid."""
    fine: int = Field(default=50, ge=1, le=10**6)
    """Rounds of all other search stages. A contest runs as many rounds as confirm."""
    confirm: int = Field(default=70, ge=1, le=10**6)
    """Rounds of the winners' final runs, which are evaluated on the test rows."""
