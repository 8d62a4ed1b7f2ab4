"""The `validation` section."""

from __future__ import annotations

from pydantic import Field

from orchestrator.section import Section
from trainables.choices import ValidationBy


class ValidationSettings(Section):
    """Train rows held out to evaluate the search."""

    fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of every class; with `by: client`, share of the clients."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of the split."""
    by: ValidationBy = "row"
    """row: some rows of the clients, every client keeps at least one. client: all rows of some clients."""
