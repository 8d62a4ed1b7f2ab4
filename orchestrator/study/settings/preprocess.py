"""The `preprocess` section of a study file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.section import Section
from trainables.federation.trial_spec import Preprocess

Share = Annotated[float, Field(ge=0, lt=1)] | Literal["auto"]


class PreprocessSettings(Section):
    """Preprocessing of the features before the first round."""

    center: Share = 0.0
    """Share of the budget (of mu squared) spent on a private mean of the rows, which is subtracted from the features;
    0: no centring; auto: set by the rule in defaults.md."""
    bound: float = Field(default=Preprocess().bound, gt=0, allow_inf_nan=False)
    """l2 bound on a row in the private mean, after scaling."""
    shrink: bool = False
    """Whether the private mean is shrunk towards 0, by an amount that grows with the share of noise in it. A mean that
    is mostly noise then hardly changes the features. This costs no budget."""
    scale: Share = 0.0
    """Share of the budget (of mu squared) spent on a private estimate of the typical length of a row. Rows are then
    scaled to a length of about 8. 0: no scaling; auto: set by the rule in defaults.md."""
    length: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The typical length of a row, if it is public knowledge; replaces `scale`. 0: not given."""

    @model_validator(mode="after")
    def _one_length(self) -> PreprocessSettings:
        if self.length and self.scale:
            raise ValueError(f"length = {self.length:g} and scale = {self.scale}: give only one of them")
        return self


ADAPTIVE = PreprocessSettings(scale="auto", center="auto", bound=10.0, shrink=True)
"""The settings of `defaults: adaptive`."""
