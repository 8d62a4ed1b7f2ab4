"""Pinned results of the engine, so that no result changes without a new ENGINE_VERSION.

`make goldens` recomputes everything, prints what changed and writes it. Integer results, such as which client has which
rows, are pinned exactly. Floating-point sums differ between processors: they are pinned as projections on a fixed
direction and compared within float32 accuracy. Tables of hand-made ledgers are pinned as text in tests/snapshots/.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import small
import table_snapshots
import torch

from trainables import models
from trainables.data import features, partition
from trainables.data.features import FeatureSet
from trainables.federation.trial_spec import Preprocess
from trainables.methods import METHODS
from trainables.methods.base import Method
from trainables.models.shard import Shard
from trainables.privacy.noise import Address
from trainables.privacy.participation import participants
from trainables.privacy.plan import Level
from trainables.spec import ENGINE_VERSION

FILE = Path(__file__).with_name("goldens.json")
CLOSE = 1e-3
"""Of the length of what was projected. A sum over some hundred rows is good to about 1e-5 of it in float32, and a few
rounds of a method that inverts a well-conditioned matrix may lose another digit or two."""
ROUNDS = 3


def exact() -> Iterator[tuple[str, Any]]:
    """Made of whole numbers, or of single draws."""
    even = _labelled(np.arange(60) % 5)
    uneven = _labelled([0] * 60 + [1] * 2 + [2] * 20)
    for text, data, clients in (
        ("iid", even, 7),
        ("dirichlet:0.5", even, 4),
        ("classes:2", even, 5),
        ("classes:1", uneven, 3),  # the one with two rows is topped up
    ):
        dealt = partition.partition(data, partition.parse(text, clients=clients, seed=42))
        yield f"partition {text}, {clients} clients", [rows.tolist() for rows in dealt.rows]
    yield "validation rows", even.validation_rows(0.2, 42).tolist()
    yield "validation rows, seed 7", even.validation_rows(0.2, 7).tolist()
    yield "participants", [np.flatnonzero(participants(42, t, 10, 0.3)).tolist() for t in (1, 2, 3)]
    for method in METHODS.values():
        declared = [tuple(map(str, astuple(replace(h, description="")))) for h in method.hyperparameters]
        yield f"what {method.name} declares", [declared, list(method.levels), method.second_order]
        for level in method.levels:
            yield f"what clients of {method.name} do, {level} level", _declared(method, level)
    for purpose in ("gradient", "sample"):
        drawn = Address(42, 3, 7, 1, purpose).generator().integers(0, 2**32, 4)
        yield f"bits at an address of {purpose}", drawn.tolist()


def close() -> Iterator[tuple[str, float, float]]:
    """A name, a projection, and the length of what was projected."""
    for source in (
        "synthetic-frozen:60,20,12,4",
        "simulated:logistic,3,20,uniform,2,5",
        "simulated:poisson,2,30,equal,2,5",
    ):
        data = features.load(source)
        for name in ("x_train", "y_train", "x_test", "y_test"):
            yield f"{source} {name}", *_projected(getattr(data, name))
    rng = np.random.default_rng(0)
    parts = [(rng.standard_normal((40, 6)).astype(np.float32), rng.integers(0, 3, 40)) for _ in range(2)]
    for text in ("softmax", "mlp:5", "multinomial", "poisson"):
        model = models.parse(text, features=6, classes=3)
        yield f"first weights of {text}", *_projected(model.initial(42).numpy())
        theta = torch.from_numpy(rng.standard_normal((3, model.dimension)).astype(np.float32))
        total, _ = model.clipped_gradient_sum(Shard.build(parts), theta, torch.tensor([0.3, 1.0, 30.0]))
        yield f"kernel of {text}", *_projected(total.numpy())
    for method in METHODS.values():
        for level in method.levels:
            of = next(of for of in _problems() if method.accepts(of.model))
            trial = small.trial(of, method.name, rounds=ROUNDS + 1, every=ROUNDS + 1, clip=1.0, level=level)
            weights, _ = small.weights_after(ROUNDS, [trial], of)
            yield f"{method.name}, {level} level", *_projected(weights)
    for name in ("dp-fedgd", "dp-ls", "dp-fednew-fc"):
        of, centre = next(_problems()), Preprocess(center=0.1, bound=3.0)
        trials = [small.trial(of, name, rounds=ROUNDS + 1, every=ROUNDS + 1, clip=1.0, seed=seed) for seed in (42, 7)]
        centred = [trial.model_copy(update={"preprocess": centre, "aggregate": "size"}) for trial in trials]
        yield f"{name}, centred", *_projected(small.weights_after(ROUNDS, centred, of)[0])


def _problems():
    return (small.problem(data="synthetic-frozen:60,20,12,4", clients=3, model=m) for m in ("softmax", "multinomial"))


def _declared(method: Method, level: Level) -> list[Any]:
    program = method.program({**method.check({}), "clipping": "plain"}, level)
    model = next(of.model for of in _problems() if method.accepts(of.model))
    asked = [list(program.hypers), program.prepares, program.allows_secret_participation, program.adapts_clip]
    return [program.name, *asked, program.stateful, program.samples, program.participation, program.release_size(model)]


def _labelled(labels) -> FeatureSet:
    y = np.asarray(labels, dtype=np.int64)
    x = np.zeros((len(y), 1), dtype=np.float32)
    return FeatureSet("labels", "labels", x, y, x[:1], y[:1])


def _projected(values: np.ndarray) -> tuple[float, float]:
    flat = np.asarray(values, dtype=np.float64).ravel()
    direction = np.random.default_rng(flat.size).choice([-1.0, 1.0], flat.size)
    return float(flat @ direction), float(np.linalg.norm(flat))


COMPUTED = {
    "exact": lambda: {name: _short(value) for name, value in exact()},
    "close": lambda: {name: [projection, length] for name, projection, length in close()},
}


def computed(*kinds: str) -> dict[str, Any]:
    return {"engine_version": ENGINE_VERSION} | {kind: COMPUTED[kind]() for kind in kinds or COMPUTED}


def _short(value: Any) -> str:
    """As it is, or its hash where it is long."""
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) < 80 else hashlib.sha256(text.encode()).hexdigest()[:32]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for everything that was computed and is not what it was."""
    found = []
    for kind in (kind for kind in COMPUTED if kind in new):
        for name in [*old[kind], *(name for name in new[kind] if name not in old[kind])]:
            before, now = old[kind].get(name), new[kind].get(name)
            if before is None or now is None:
                found.append(f"{name}: {'is new' if before is None else 'is gone'}")
            elif kind == "exact" and before != now:
                found.append(f"{name}: {before} is now {now}")
            elif kind == "close" and not abs(before[0] - now[0]) <= CLOSE * before[1]:
                found.append(f"{name}: {before[0]:.6g} is now {now[0]:.6g}, of a length of {before[1]:.3g}")
    return found


def renew() -> None:
    old = (
        json.loads(FILE.read_text()) if FILE.exists() else {"exact": {}, "close": {}, "engine_version": ENGINE_VERSION}
    )
    new = computed()
    changes = differences(old, new)
    print("\n".join(changes) or "no result has changed")
    if any(not line.endswith("is new") for line in changes) and old["engine_version"] == ENGINE_VERSION:
        print(f"results change, and ENGINE_VERSION is still {ENGINE_VERSION}: raise it in trainables/spec.py")
    if changes or old["engine_version"] != ENGINE_VERSION:
        FILE.write_text(json.dumps(new, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(table_snapshots.renew(Path(folder))) or "no table has changed")


if __name__ == "__main__":
    sys.exit(renew())
