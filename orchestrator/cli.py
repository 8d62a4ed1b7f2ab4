"""The command `fedsweep`."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from orchestrator.commands import (
    audit,
    bench,
    best,
    calibrate,
    cancel,
    check_method,
    compare,
    data,
    doctor,
    export,
    figures,
    lookup,
    merge,
    methods,
    partition,
    plan,
    predict,
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
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    *(run.run, resume.resume, cancel.cancel, merge.merge, status.status, plan.plan, tables.tables),
    *(figures.figures, report.report, serve.serve, best.best, compare.compare, export.export, lookup.lookup),
    *(methods.methods, calibrate.calibrate, partition.partition, train.train, predict.predict, audit.audit),
    *(check_method.check_method, doctor.doctor, bench.bench),
):
    app.command()(command)
app.add_typer(data.data, name="data")


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Load a plug-in, by module or .py file; may be repeated and stand anywhere in the command.",
        ),
    ] = None,
) -> None:
    if version:
        raise typer.Exit(0)


# typer carries its own click and exports few of its names: BadParameter > UsageError > ClickException
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> None:
    try:
        arguments, asked_for = _plugins_apart(sys.argv[1:])
        if arguments == ["--version"]:
            sys.stdout.write(f"fedsweep {metadata.version('fedsweep')}\n")
            sys.exit(0)
        if arguments and not any(argument in ("-h", "--help") for argument in arguments):
            _load_plugins(asked_for)
        code = app(args=arguments or ["--help"], standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except _CommandLineError as error:
        sentence = error.format_message().replace("Value error, ", "").rstrip(".")  # type: ignore[attr-defined]
        _fail(f"{sentence}; see fedsweep --help")
    else:
        sys.exit(code or 0)


def _plugins_apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """`--import MODULE` may stand anywhere; plug-ins are loaded before anything else is looked at."""
    rest, found = [], []
    words = iter(arguments)
    for word in words:
        if word == "--import":
            found.append(next(words, ""))
        elif word.startswith("--import="):
            found.append(word.removeprefix("--import="))
        else:
            rest.append(word)
    return rest, found


def _load_plugins(asked_for: list[str]) -> None:
    if not asked_for and not os.environ.get("FEDSWEEP_IMPORT") and not metadata.entry_points(group="fedsweep.plugins"):
        return  # the usual case, in which a mistake on the command line should not cost an import of Ray
    from trainables import plugins

    for name in asked_for:
        if not name:
            raise UserError("--import names no module")
        plugins.use(name)
    plugins.load_all()


def _fail(sentence: str, code: int = 2) -> None:
    sys.stderr.write(f"fedsweep: {sentence}{'' if sentence.endswith('?') else '.'}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
