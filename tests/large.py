"""Large ledgers, written in bulk, which is much faster than row by row as a sweep does."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from handmade_ledgers import LAST, row, study, writing

from trainables.spec import content_key


def wide_study(methods: int, **changes):
    """Many variants of one method."""
    variants = [{"dp-fedadam": {"label": f"Variant {number}", "clip": 1 + number}} for number in range(methods)]
    return study(methods=variants, **changes)


def write(folder: Path, of, configurations: int, *, points: int = 1, metrics: Sequence[str] = ()) -> int:
    """Write for every cell a coarse grid of `configurations` on every search seed, and confirm trials; all trials have
    curves of `points` points for accuracy and `metrics`. Returns the number of trials."""
    trials = 0
    curve = {t: 50.12345 + t / 7 for t in range(1, points + 1)} | {LAST: 50.0}
    with writing(folder, of) as writer:
        writer.ledger.begin_session()
        for method in of.methods:
            for epsilon in of.epsilons:
                cell = writer.cell(method.name, epsilon, method.shown)
                for stage, count in (("coarse", configurations), ("confirm", 1)):
                    like = row(writer.trial(method.name, epsilon, {}, 0, confirm=stage == "confirm"), curve)
                    like = replace(like, metrics=dict.fromkeys(("accuracy", *metrics), curve))
                    spec, rows = json.loads(like.spec), []
                    for number in range(count):
                        spec["hyperparameters"] |= {"learning_rate": (number % 100 + 1) / 7, "tau": number // 100 + 1.0}
                        for spec["seed"] in of.variants[0].seeds(stage):
                            key, score = (
                                content_key(f"{cell} {stage} {number} {spec['seed']}"),
                                40 + 20 * number / count,
                            )
                            rows.append(replace(like, key=key, spec=json.dumps(spec), accuracy=score))
                    writer.ledger.add(rows)
                    writer.ledger.add_stage(cell, of.variants[0].name, stage, [each.key for each in rows])
                    trials += len(rows)
    return trials
