"""The data card of an exported table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from orchestrator.report.benchmark.columns import COLUMNS, FILE, HYPER
from orchestrator.report.tables.render import markdown_text
from orchestrator.results.winners import Results
from trainables.spec import ENGINE_VERSION

NOTES = f"""
## Notes

- Rows with `split` validation belong to the search; rows with `split` test belong to the winners.
- All runs with the same seed share their noise: two configurations on one seed are compared under the same draw.
- The grid is a union of a coarse and a fine grid, so not every combination of values exists.
- A run that diverged (`state`) has rows up to the round in which this was found. Its scores of that round mean nothing.
- Private training was simulated on public data. On private data, publishing all runs would cost far more than the ε of
  one run.

Query the table with `fedsweep lookup {FILE} --method dp-fedgd --epsilon 1`. In Python, or as the objective of a tuner,
use `orchestrator.report.benchmark.lookup.Task`.
"""


def page(results: Results, data: Mapping[str, str], counts: Counter[str], hypers: Mapping[str, bool]) -> str:
    """`hypers`: for each hyperparameter, whether all its values are numbers."""
    study = results.study
    states = {name.removeprefix("state:"): count for name, count in sorted(counts.items()) if name.startswith("state:")}
    seeds = sorted({*study.seeds.search, *study.seeds.contest, *study.seeds.confirm})
    facts = {
        "methods": ", ".join(dict.fromkeys(method.shown for method in study.methods)),
        "ε": ", ".join(f"{epsilon:g}" for epsilon in study.epsilons),
        "settings": "; ".join(results.settings),
        "seeds": ", ".join(map(str, seeds)),
        "trials": ", ".join(f"{count:,} {state}" for state, count in states.items()),
        "data": "; ".join(f"{label} ({fingerprint})" for label, fingerprint in data.items()),
        "engine version": str(ENGINE_VERSION),
    }
    columns = {
        **COLUMNS,
        **{
            f"{HYPER}{name}": ("double" if number else "string", f"hyperparameter {name}; empty for methods without it")
            for name, number in hypers.items()
        },
    }
    head = [f"# Trials of study {markdown_text(study.name)}\n"]
    if study.description:
        head.append(f"{markdown_text(study.description.strip())}\n")
    head.append(
        f"{counts['trials']:,} training runs, {counts['rows']:,} rows: one per run and evaluated round. Every run "
        "trained a head with differential privacy on a federation of clients.\n"
    )
    head += [f"- {name}: {markdown_text(text)}" for name, text in facts.items()]
    head += ["\n## Columns\n", "| column | type | meaning |\n|---|---|---|"]
    return "\n".join([*head, *(f"| {name} | {kind} | {what} |" for name, (kind, what) in columns.items()), NOTES])
