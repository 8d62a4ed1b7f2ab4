"""The base class of all specifications: immutable, with a hash of the content as key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

ENGINE_VERSION = 6
"""Part of every key. Raise it when a change of the code changes results, so that older results are not reused."""

HyperValue = float | int | bool | str


def content_key(text: str) -> str:
    return hashlib.sha256(f"{ENGINE_VERSION}:{text}".encode()).hexdigest()[:24]


class Spec(BaseModel):
    """An immutable specification whose key is a hash of its content."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("key", None)  # discard the cached key of the original
        return copy

    @cached_property
    def key(self) -> str:
        return content_key(json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")))
