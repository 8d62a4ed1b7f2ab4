"""Checks of a model on a small problem, for `fedsweep check-model`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainables import models
from trainables.models import Model
from trainables.models.shard import Shard

FEATURES = 6
"""Default number of features."""
CLASSES, ROWS, LANES = 3, 48, 3
CLIP = 0.5
ROUNDING = 1e-6  # relative error of a norm in float32
TOLERANCE = 1e-2  # error of a numerical derivative in float32, relative to the largest derivative in any direction


@dataclass(frozen=True)
class Result:
    check: str
    failure: str = ""
    """Empty if the check passed."""


def run_checks(
    name: str, announce: Callable[[str], None] = lambda check: None, *, features: int = FEATURES
) -> Iterator[Result]:
    """Run all checks of a model. An exception counts as a failure. `name`: as in a study, such as `mlp:64`. `announce`:
    is called with the title of each check before it runs."""
    model = models.parse(name, features=features, classes=CLASSES)
    rows = _rows(model, features)
    for check in (_shapes, _gradient, _lanes, _clip, _training):
        title = (check.__doc__ or "").partition(".")[0]
        announce(title)
        try:
            yield Result(title, check(model, rows))
        except Exception as error:  # a model of a plug-in may raise anything
            yield Result(title, f"{type(error).__name__}: {error}".splitlines()[0])


def _rows(model: Model, features: int) -> Shard:
    random = np.random.default_rng(0)
    labels = np.arange(ROWS) % CLASSES
    centres = 2 * random.normal(size=(CLASSES, features))
    x = (centres[labels] + random.normal(size=(ROWS, features))).astype(np.float32)
    return Shard.build([(models.at_cut(model, x), labels)])


def _theta(model: Model) -> torch.Tensor:
    return torch.stack([model.initial(seed) for seed in range(LANES)])


def _shapes(model: Model, shard: Shard) -> str:
    """Weights and scores have the declared shapes."""
    theta = _theta(model)
    if theta.shape != (LANES, model.dimension) or sum(model.blocks) != model.dimension:
        return f"the initial weights have shape {tuple(theta.shape[1:])}, expected ({model.dimension},)"
    scores = model.scores(shard.x[0], theta[0])
    if scores.shape != (ROWS, CLASSES):
        return f"the scores have shape {tuple(scores.shape)}, expected ({ROWS}, {CLASSES}): rows, classes"
    return "" if torch.isfinite(scores).all() else "with the initial weights, a score is not finite"


def _gradient(model: Model, shard: Shard) -> str:
    """The gradient is the derivative of the evaluated loss."""
    theta = _theta(model)
    total, _ = model.clipped_gradient_sum(shard, theta, torch.full((LANES,), 1e9))
    direction = torch.from_numpy(np.random.default_rng(1).normal(size=model.dimension)).to(theta)
    step = 1e-2 / direction.norm()
    after, before = (model.evaluate(shard, theta + sign * step * direction)[0].double() for sign in (1, -1))
    numerical = ROWS * (after - before) / (2 * step.double())
    analytic = total[0] @ direction.double()
    scale = total[0].norm(dim=1) * direction.double().norm()
    worst = float(((numerical - analytic).abs() / scale).max())
    return "" if worst < TOLERANCE else f"the gradient differs from a numerical derivative by a fraction of {worst:.2g}"


def _lanes(model: Model, shard: Shard) -> str:
    """A lane gives the same bits alone and with other lanes."""
    theta, clip = _theta(model), torch.full((LANES,), CLIP)
    together, _ = model.clipped_gradient_sum(shard, theta, clip)
    loss, _ = model.evaluate(shard, theta)
    for lane in range(LANES):
        one = slice(lane, lane + 1)
        alone, _ = model.clipped_gradient_sum(shard, theta[one], clip[one])
        if not torch.equal(alone[:, 0], together[:, lane]):
            return f"the gradient of lane {lane} depends on the other lanes"
        if not torch.equal(model.evaluate(shard, theta[one])[0], loss[one]):
            return f"the loss of lane {lane} depends on the other lanes"
    return ""


def _clip(model: Model, shard: Shard) -> str:
    """No row contributes more than the clip."""
    theta, clip = 3 * _theta(model), torch.full((LANES,), CLIP)
    for row in range(ROWS):
        x, labels = shard.x[0, row : row + 1, :-1].numpy(), shard.y[0, row : row + 1].numpy()
        one, _ = model.clipped_gradient_sum(Shard.build([(np.float32(1e3) * x, labels)]), theta, clip)
        longest = float(one.norm(dim=2).max())
        if not longest <= CLIP * (1 + ROUNDING):
            return f"row {row} contributes {longest:.6g}, the clip is {CLIP:g}"
    return ""


def _training(model: Model, shard: Shard) -> str:
    """Gradient steps reduce the loss."""
    theta, clip = _theta(model), torch.full((LANES,), 1e9)
    before, _ = model.evaluate(shard, theta)
    for _ in range(20):
        total, _ = model.clipped_gradient_sum(shard, theta, clip)
        theta = theta - 0.1 * (total[0] / ROWS).to(theta)
    after, _ = model.evaluate(shard, theta)
    return "" if bool((after < before).all()) else f"the loss went from {before.tolist()} to {after.tolist()}"
