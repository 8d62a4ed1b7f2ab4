"""The command `fedsweep`."""

from __future__ import annotations

import sys

import typer

from orchestrator.commands import (
    audit,
    bench,
    best,
    calibrate,
    cancel,
    compare,
    data,
    export,
    figures,
    lookup,
    merge,
    methods,
    partition,
    plan,
    report,
    resume,
    run,
    serve,
    status,
    tables,
    train,
)
from trainables.errors import UserError

app = typer.Typer(
    help="Hyperparameter sweeps for differentially private federated learning, on Ray.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    *(run.run, resume.resume, cancel.cancel, merge.merge, status.status, plan.plan, tables.tables),
    *(figures.figures, report.report, serve.serve, best.best, compare.compare, export.export, lookup.lookup),
    *(methods.methods, calibrate.calibrate, partition.partition, train.train, audit.audit, bench.bench),
):
    app.command()(command)
app.add_typer(data.data, name="data")

# typer carries its own click and exports few of its names: BadParameter > UsageError > ClickException
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> None:
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except _CommandLineError as error:
        sentence = error.format_message().replace("Value error, ", "").rstrip(".")  # type: ignore[attr-defined]
        _fail(f"{sentence}; see fedsweep --help")
    else:
        sys.exit(code or 0)


def _fail(sentence: str, code: int = 2) -> None:
    sys.stderr.write(f"fedsweep: {sentence}.\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
