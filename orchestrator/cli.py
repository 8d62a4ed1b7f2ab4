"""The command `fedsweep`."""

from __future__ import annotations

import orchestrator.current_folder  # isort: skip  # first: it removes the current folder from sys.path
import orchestrator.one_thread  # noqa: F401  # isort: skip  # before NumPy

import os
import stat
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import (
    account,
    audit,
    bench,
    best,
    calibrate,
    cancel,
    check,
    check_method,
    check_model,
    compare,
    data,
    doctor,
    export,
    figures,
    forget,
    frontier,
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
from orchestrator.version import version
from trainables.errors import UserError
from trainables.files import replaceable_part

app = typer.Typer(
    help="Hyperparameter sweeps for differentially private federated learning, on Ray.",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    *(
        run.run,
        resume.resume,
        cancel.cancel,
        check.check,
        forget.forget,
        merge.merge,
        status.status,
        plan.plan,
        tables.tables,
    ),
    *(figures.figures, report.report, serve.serve, best.best, compare.compare, export.export, lookup.lookup),
    *(frontier.frontier,),
    *(methods.methods, calibrate.calibrate, partition.partition, train.train, predict.predict, account.account),
    *(audit.audit, check_method.check_method, check_model.check_model, doctor.doctor, bench.bench),
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
            help="Load a plug-in, by module name or .py file; repeatable, at any position in the command.",
        ),
    ] = None,
) -> None:
    if version:
        raise typer.Exit(0)


# typer bundles click and does not export ClickException: BadParameter > UsageError > ClickException
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> None:
    try:
        arguments, plugin_names = _split_imports(sys.argv[1:])
        if arguments[:1] == ["--version"]:
            sys.stdout.write(f"fedsweep {version()}\n")
            sys.exit(0)
        if arguments and not any(argument in ("-h", "--help") for argument in arguments):
            _refuse_home_of_another_user()
            _load_plugins(plugin_names)
        code = app(args=arguments or ["--help"], standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except _CommandLineError as error:
        sentence = error.format_message().replace("Value error, ", "").rstrip(".")  # type: ignore[attr-defined]
        _fail(f"{sentence}; see fedsweep {_command(error)}--help")
    except Exception as error:
        from trainables import plugins

        explanation = plugins.explain(error)
        _write_error(f"fedsweep: {explanation}\n" if explanation else traceback.format_exc())
        sys.exit(2 if explanation else 1)
    else:
        sys.exit(code or 0)


def _refuse_home_of_another_user() -> None:
    """Refuse a home that another user can change: cached code in it is executed, and keys and tokens are trusted."""
    home = os.environ.get("HOME", "")
    if os.path.isabs(home) and (other := replaceable_part(Path(home))) is not None:
        raise UserError(f"HOME = {home!r}: another user can replace {other}; set HOME to a folder of your own")
    if os.path.exists(home) and os.stat(home).st_mode & stat.S_IWOTH:
        raise UserError(f"HOME = {home!r}: everyone can write to it; set HOME to a folder of your own")


def _split_imports(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate `--import MODULE` from the other arguments: plug-ins are loaded before the command is parsed."""
    others, imports = [], []
    words = iter(arguments)
    for word in words:
        if word == "--import":
            imports.append(next(words, ""))
        elif word.startswith("--import="):
            imports.append(word.removeprefix("--import="))
        else:
            others.append(word)
    return others, imports


def _load_plugins(names: list[str]) -> None:
    if not names and not os.environ.get("FEDSWEEP_IMPORT") and not metadata.entry_points(group="fedsweep.plugins"):
        return  # the common case: avoid slow imports
    from trainables import plugins

    for name in names:
        if not name:
            raise UserError("--import names no module")
        plugins.use(name)
    plugins.load_all()


def _command(error: Exception) -> str:
    """The command that the error is about, followed by a space; empty if there is none."""
    words, context = "", getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        words, context = f"{context.info_name} {words}", context.parent
    return words


def _fail(sentence: str, code: int = 2) -> None:
    sentence, newline, trace = sentence.partition("\n")  # after the first line: the traceback of a plug-in
    _write_error(f"fedsweep: {sentence}{'' if sentence.endswith('?') else '.'}\n{trace}{newline}")
    sys.exit(code)


def _write_error(text: str) -> None:
    from orchestrator.console import printable
    from trainables.urls import shown

    sys.stderr.write(printable(shown(text)))


if __name__ == "__main__":
    main()
