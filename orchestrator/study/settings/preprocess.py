"""The `preprocess` section."""

from __future__ import annotations

from pydantic import Field

from orchestrator.section import Section
from trainables.federation.trial_spec import Preprocess


class PreprocessSettings(Section):
    """Preprocessing of the features before the first round."""

    center: float = Field(default=0.0, ge=0, lt=1)
    """Share of the budget (of mu squared) spent on a private mean, which is subtracted from the features."""
    bound: float = Field(default=Preprocess().bound, gt=0, allow_inf_nan=False)
    """l2 bound on a row in that mean."""
