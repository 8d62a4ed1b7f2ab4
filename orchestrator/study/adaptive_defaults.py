"""The options that `defaults: adaptive` gives a method where neither the study nor the method sets them (see
docs/defaults.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.settings.preprocess import ADAPTIVE, PreprocessSettings
from trainables.federation.trial_spec import Preprocess
from trainables.privacy.plan import PrivacySettings
from trainables.privacy.shares import shares

CLIPS = [1.0, 3.0, 10.0]
"""For features that are scaled to a length of about 8."""
CLIP = 3.0
"""The clip where it is not tuned: in a single training run, in a study's own search space, which is taken as it is, and
in spaces with many axes."""
FEW_AXES = 2
"""Spaces with at most this many axes also search the clip, which multiplies the number of configurations by 3."""


def with_defaults(method: MethodSettings, *, scaled: bool, size_weighted: bool, clip_tuned: bool) -> MethodSettings:
    """`method` with those defaults that it does not set itself: scaling and centring (`scaled`), weights by size, and a
    clip. A method that runs as released gets none."""
    if method.as_released:
        return method
    changes: dict[str, Any] = {}
    if scaled and method.preprocess is None:
        changes["preprocess"] = ADAPTIVE
    if size_weighted and method.aggregate is None:
        changes["aggregate"] = "size"
    space = method.space()
    own = method.clip is not None or "clip" in {*space.coarse, *space.fixed} or method.clipping == "adaptive"
    if clip_tuned and not own:
        tuned = method.search_space is None and len(space.coarse) <= FEW_AXES
        changes |= {"coarse": {**method.coarse, "clip": CLIPS}} if tuned else {"clip": CLIP}
    return method.model_copy(update=changes) if changes else method


def with_shares(
    given: PreprocessSettings, privacy: PrivacySettings, sizes: Sequence[int], features: int, *, allowed: bool
) -> Preprocess:
    """The preprocessing with numbers for the shares that are `auto`. `allowed`: whether the model allows centred and
    scaled features; if not, these shares are 0."""
    numbers = given.model_dump()
    if auto_names := [name for name in ("scale", "center") if numbers[name] == "auto"]:
        chosen = shares(privacy, sizes, features)._asdict()
        numbers |= {name: chosen[name] if allowed else 0.0 for name in auto_names}
    return Preprocess(**numbers)
