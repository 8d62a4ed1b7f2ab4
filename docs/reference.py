"""Writes docs/reference/ from the code itself, whenever the site is built: the pages cannot say what is not so."""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

FOLDER = Path(__file__).parent / "reference"


def pages() -> dict[str, str]:
    return {"commands.md": commands(), "study.md": study(), "methods.md": methods(), "python.md": python()}


def commands() -> str:
    from orchestrator.cli import app

    parts = ["# Commands\n", "Every command prints its options with `--help`. Exit codes: 0 done, 1 the command found"]
    parts[-1] += " something wrong (failed trials, a broken method, a leak), 2 bad input, 130 interrupted.\n"
    group = typer.main.get_command(app)
    parts.append(f"## fedsweep\n\n{_options(group)}")
    for name, command in sorted(_leaves("", group)):
        parts.append(
            f"## fedsweep {name}\n\n{_help(command)}\n\n```\n{_usage(name, command)}\n```\n\n{_options(command)}"
        )
    return "\n".join(parts)


def _leaves(before: str, group: Any) -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        full = f"{before}{name}"
        found += _leaves(f"{full} ", command) if hasattr(command, "commands") else [(full, command)]
    return found


def _usage(name: str, command: Any) -> str:
    words = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
    return " ".join(["fedsweep", name, *words, "[OPTIONS]"])


def _help(command: Any) -> str:
    return " ".join((command.help or "").split())


def _options(command: Any) -> str:
    rows = []
    for p in command.params:
        if p.name == "help" or getattr(p, "hidden", False):
            continue
        names = p.opts if p.param_type_name == "option" else [p.metavar or p.name.upper()]
        default = getattr(p, "default", None)
        plain = default is None or default is False or callable(default) or default == []
        shown = "" if plain else f"`{getattr(default, 'value', default)}`"
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {_cell(getattr(p, 'help', '') or '')} | {shown} |")
    return "\n".join(["| Option | What it is | Default |", "| --- | --- | --- |", *rows, ""]) if rows else ""


def study() -> str:
    from orchestrator.study.settings import Study

    parts = ["# Study keys\n", "What a study file may say; [Write a study](../studies.md) shows one whole.\n"]
    parts += _sections("", Study)
    return "\n".join(parts)


def _sections(path: str, model: type[BaseModel]) -> list[str]:
    rows, inner = [], []
    for name, field in model.model_fields.items():
        models = _models(field.annotation)
        default = field.get_default(call_default_factory=True)
        if models and not isinstance(default, list | type(PydanticUndefined)):
            shown = f"see [{path}{name}](#{_anchor(path + name)})"
        elif default is PydanticUndefined:
            shown = "required"
        else:
            shown = f"`{_value(default)}`"
        rows.append(f"| `{name}` | {_cell(_field_text(model, name))} | {shown} |")
        inner += [(f"{path}{name}", m) for m in models]
    title = f"## {path.rstrip('.')}\n" if path else "## The study\n"
    text = " ".join((model.__dict__["__doc__"] or "").split())
    table = ["| Key | What it is | Default |", "| --- | --- | --- |", *rows, ""]
    parts = [title, *([text + "\n"] if path and text else []), *table]
    for name, m in inner:
        parts += _sections(f"{name}.", m)
    return parts


def _anchor(path: str) -> str:
    return path.replace(".", "").replace("_", "_").lower()


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models(part)]


def _field_text(model: type[BaseModel], name: str) -> str:
    """The text that stands under the field in the source; else that of its section; and what may be chosen."""
    field = model.model_fields[name]
    text = _under(model, name) or " ".join(inner.__dict__["__doc__"] or "" for inner in _models(field.annotation))
    choices = [repr(a) for part in _literals(field.annotation) for a in get_args(part)]
    return f"{text} One of: {', '.join(choices)}.".strip() if choices and "auto" not in str(choices) else text


def _under(owner: type, name: str) -> str:
    """A field's text: the string that follows it in the class."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner))).body[0].body
    for this, following in itertools.pairwise(body):
        named = isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name) and this.target.id == name
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return " ".join(str(following.value.value).split())
    return ""


def _literals(annotation: Any) -> list[Any]:
    if getattr(annotation, "__origin__", None) is not None and str(annotation.__origin__) == "typing.Literal":
        return [annotation]
    return [found for part in get_args(annotation) for found in _literals(part)]


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def methods() -> str:
    from trainables.methods import METHODS

    parts = [
        "# Methods and hyperparameters\n",
        "As `fedsweep methods` lists them; [Methods](../methods.md) explains.\n",
    ]
    for method in METHODS.values():
        parts.append(
            f"## {method.name}\n\n{method.title}; {method.paper}. Protects: {', '.join(method.levels)} level.\n"
        )
        parts += ["| Hyperparameter | Default | What it is |", "| --- | --- | --- |"]
        parts += [f"| `{h.name}` | `{h.default}` | {_cell(h.description)} |" for h in method.hyperparameters]
        parts.append("")
    return "\n".join(parts)


def python() -> str:
    import fedsweep
    import fedsweep.plugins

    parts = ["# Python\n", f"{_doc(fedsweep)}\n"]
    for name in fedsweep.__all__:
        value = getattr(fedsweep, name)
        if name != "__version__":
            parts.append(_documented(f"fedsweep.{name}", value))
    parts.append(f"## fedsweep.plugins\n\n{_doc(fedsweep.plugins)}\n")
    added = ("use", "Method", "Hyperparameter", "learning_rate", "ClientProgram", "ClientRound", "Event", "Run")
    added = (*added, "head", "data_source", "partition")
    parts += [_documented(f"fedsweep.plugins.{name}", getattr(fedsweep.plugins, name)) for name in added]
    return "\n".join(parts)


def _documented(name: str, value: Any) -> str:
    if not inspect.isclass(value):
        return f"## {name}\n\n```python\n{name.rpartition('.')[2]}{_signature(value)}\n```\n\n{_doc(value)}\n"
    if issubclass(value, BaseModel):
        return f"## {name}\n\nA study as [Study keys](study.md) describes it; `Study.model_validate(dict)` makes one.\n"
    public = {name: member for name, member in vars(value).items() if not name.startswith("_")}
    rows = [f"| `{n}` | {_cell(_doc(m.fget))} |" for n, m in public.items() if isinstance(m, property)]
    rows += [
        f"| `{n}({', '.join(_takes(m))})` | {_cell(_doc(m))} |" for n, m in public.items() if inspect.isfunction(m)
    ]
    fields = [name for name in getattr(value, "__dataclass_fields__", {}) if not name.startswith("_")]
    rows += [f"| `{attribute}` | {_cell(_under(value, attribute))} |" for attribute in fields]
    table = "\n".join(["| | |", "| --- | --- |", *rows, ""]) if rows else ""
    return f"## {name}\n\n{_doc(value)}\n\n{table}"


def _takes(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def _signature(value: Any) -> str:
    text = []
    for parameter in inspect.signature(value).parameters.values():
        default = parameter.default
        shown = "" if default is inspect.Parameter.empty else f" = {'…' if callable(default) else repr(default)}"
        text.append(f"{parameter.name}{shown}")
    return f"({', '.join(text)})"


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
