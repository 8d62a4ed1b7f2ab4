"""The `preprocess` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.section import Section
from trainables.federation.trial_spec import Preprocess

Share = Annotated[float, Field(ge=0, lt=1)] | Literal["auto"]


class PreprocessSettings(Section):
    """Preprocessing of the features before the first round."""

    center: Share = 0.0
    """Share of the budget (of mu squared) spent on a private mean, which is subtracted from the features; auto: by the
    rule in defaults.md, which may be 0."""
    bound: float = Field(default=Preprocess().bound, gt=0, allow_inf_nan=False)
    """l2 bound on a row in that mean, after scaling."""
    shrink: bool = False
    """Whether that mean is shrunk towards 0, the more of its length is noise: where noise prevails, features are hardly
    centred. It costs no budget."""
    scale: Share = 0.0
    """Share of the budget spent on the typical length of a row, which scales the features to a length of about 8; auto:
    by the rule in defaults.md."""
    length: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The typical length of a row where it is public knowledge, instead of `scale`; 0: it is not declared."""

    @model_validator(mode="after")
    def _one_length(self) -> PreprocessSettings:
        if self.length and self.scale:
            raise ValueError(f"length = {self.length:g} is declared, so scale = {self.scale} is not needed")
        return self


ADAPTIVE = PreprocessSettings(scale="auto", center="auto", bound=10.0, shrink=True)
"""The settings of `defaults: adaptive`."""
