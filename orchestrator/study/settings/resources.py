"""The `resources` section. Nothing in it changes a result, except that another kind of device rounds differently."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from orchestrator.section import Section


class ResourceSettings(Section):
    """How the cluster is used. Results stay the same, except for rounding on another kind of device."""

    hosts: int | Literal["auto"] = Field(default="auto")
    """Client hosts of a federation; auto: by the cores of a node."""
    gpus_per_host: float | Literal["auto"] = Field(default="auto")
    """auto: one GPU if the node has any, else none. Hosts can share a GPU: 0.5."""
    lanes_per_pack: int | Literal["auto"] = Field(default="auto")
    """Trials computed together; auto: as many as fit and still speed things up."""
    federations: int | Literal["auto"] = Field(default="auto")
    """Most federations that work at the same time; auto: as many as the cluster has room for."""
    memory_gib_per_host: float = Field(default=0.0, ge=0, le=1e5)
    """Memory that Ray reserves for a host; 0: none."""
    accelerator: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """GPU type as Ray names it (H200, A100): only nodes with this type are used."""
    placement: Literal["pack", "spread"] = "pack"
    """Whether the hosts of a federation share a node or spread over nodes."""

    @field_validator("gpus_per_host")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float | int) and not 0 <= value <= 64:
            raise ValueError(f"{value} is not in [0, 64]")
        return value

    @field_validator("hosts", "lanes_per_pack", "federations")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is less than 1")
        return value
