"""Write docs/reference/ from the code. The site build runs this, so the pages always match the code."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterable
from enum import Enum
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, get_args, get_type_hints

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

FOLDER = Path(__file__).parent / "reference"
EXIT_CODES = (
    "0 | success",
    "1 | the command found a problem: failed trials, a broken method, a leak",
    "2 | invalid input, or the study cannot continue",
    "130 | interrupted",
)
STABILITY = re.compile(r"^Stability: *(.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
PLUGIN_NAMES = (
    *("use", "Method", "Hyperparameter", "learning_rate", "ClientProgram", "ClientRound", "Event", "Run"),
    *(
        "Metric",
        "Predictions",
        "Head",
        "Strategy",
        "Proposal",
        "AskTellStrategy",
        "Searcher",
        "Result",
        "SearchTask",
        "SearchSpace",
        "StageRounds",
        "History",
        "Candidate",
        "Rank",
    ),
    *("head", "network", "data_source", "partition"),
)


def pages() -> dict[str, str]:
    return {"commands.md": commands(), "study.md": study(), "methods.md": methods(), "python.md": python()}


def commands() -> str:
    from orchestrator.cli import app

    group = typer.main.get_command(app)
    commands = sorted(_leaves("", group))
    parts = [
        "# Commands\n",
        "Every command prints its options with `--help`.\n",
        *_table("Exit code | Meaning", EXIT_CODES),
    ]
    links = [f"[{name}](#fedsweep-{name.replace(' ', '-')}) | {_first_sentence(command)}" for name, command in commands]
    parts += _table("Command | What it does", links)
    parts.append(f"## fedsweep\n\nOptions of all commands.\n\n{_options(group)}")
    for name, command in commands:
        parts.append(
            f"## fedsweep {name}\n\n{_help(command)}\n\n```\n{_usage(name, command)}\n```\n\n{_options(command)}"
        )
    return "\n".join(parts)


def _leaves(prefix: str, group: Any) -> list[tuple[str, Any]]:
    """All commands by full name, including those of subgroups."""
    leaves = []
    for name, command in group.commands.items():
        full = f"{prefix}{name}"
        leaves += _leaves(f"{full} ", command) if hasattr(command, "commands") else [(full, command)]
    return leaves


def _usage(name: str, command: Any) -> str:
    words = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
    return " ".join(["fedsweep", name, *words, "[OPTIONS]"])


def _help(command: Any) -> str:
    return " ".join((command.help or "").split())


def _first_sentence(command: Any) -> str:
    return _cell(re.split(r"(?<=[.:;])\s", _help(command))[0].rstrip(":;."))


def _options(command: Any) -> str:
    rows = []
    for p in command.params:
        if p.name == "help" or getattr(p, "hidden", False):
            continue
        names = p.opts if p.param_type_name == "option" else [p.metavar or p.name.upper()]
        default = getattr(p, "default", None)
        no_default = default is None or default is False or callable(default) or default == []
        default_text = "" if no_default else f"`{getattr(default, 'value', default)}`"
        names_text = ", ".join(f"`{name}`" for name in names)
        rows.append(f"{names_text} | {_cell(getattr(p, 'help', '') or '')}{_choices(p)} | {default_text}")
    return "\n".join(_table("Option | Description | Default", rows)) if rows else ""


def _choices(parameter: Any) -> str:
    descriptor = getattr(parameter, "type_descriptor", None)
    annotation = getattr(descriptor, "annotation", None)
    choices = annotation if inspect.isclass(annotation) and issubclass(annotation, Enum) else get_args(annotation)
    values = [value for value in choices if isinstance(value, str)]
    return f" One of {', '.join(f'`{value}`' for value in values)}." if values else ""


def _table(header: str, rows: Iterable[str]) -> list[str]:
    rule = " | ".join("---" for _ in header.split(" | "))
    return [*(f"| {row} |" for row in (header, rule, *rows)), ""]


def study() -> str:
    from orchestrator.study.study import Study

    parts = ["# Study keys\n", "All keys of a study file. [Write a study](../studies.md) shows a complete one.\n"]
    parts += _sections("", Study)
    return "\n".join(parts)


def _sections(path: str, model: type[BaseModel]) -> list[str]:
    rows, inner = [], []
    for name, field in model.model_fields.items():
        models = _models(field.annotation)
        default = field.get_default(call_default_factory=True)
        if models and not isinstance(default, list | type(PydanticUndefined)):
            default_text = f"see [{path}{name}](#{(path + name).replace('.', '').lower()})"
        elif default is PydanticUndefined:
            default_text = "required"
        else:
            default_text = "`none`" if default is None else f"`{default}`"
        rows.append(f"`{name}` | {_cell(_field_text(model, name))} | {default_text}")
        inner += [(f"{path}{name}", m) for m in models]
    title = f"## {path.rstrip('.')}\n" if path else "## The study\n"
    text = " ".join((model.__dict__["__doc__"] or "").split())
    parts = [title, *([text + "\n"] if path and text else []), *_table("Key | Description | Default", rows)]
    for name, m in inner:
        parts += _sections(f"{name}.", m)
    return parts


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models(part)]


def _field_text(model: type[BaseModel], name: str) -> str:
    """The string below the field in the source, or the docstring of its section, and the allowed values."""
    field = model.model_fields[name]
    text = _under(model, name) or " ".join(inner.__dict__["__doc__"] or "" for inner in _models(field.annotation))
    choices = [repr(a) for part in _literals(field.annotation) for a in get_args(part)]
    return f"{text} One of: {', '.join(choices)}.".strip() if choices and "auto" not in str(choices) else text


def _under(owner: type, name: str) -> str:
    """The description of a field: the string in its annotation, or the string that follows it in the class."""
    for text in getattr(get_type_hints(owner, include_extras=True).get(name), "__metadata__", ()):
        if isinstance(text, str):
            return text
    owner = next((base for base in inspect.getmro(owner) if name in vars(base).get("__annotations__", {})), owner)
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner))).body[0].body
    for this, following in itertools.pairwise(body):
        named = isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name) and this.target.id == name
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return " ".join(str(following.value.value).split())
    return ""


def _literals(annotation: Any) -> list[Any]:
    if getattr(annotation, "__origin__", None) is not None and str(annotation.__origin__) == "typing.Literal":
        return [annotation]
    return [literal for part in get_args(annotation) for literal in _literals(part)]


def methods() -> str:
    from trainables.methods import METHODS

    parts = [
        "# Methods and hyperparameters\n",
        "The same list as `fedsweep methods`. [Methods](../methods.md) explains the methods.\n",
    ]
    for method in METHODS.values():
        parts.append(
            f"## {method.name}\n\n{method.title}; {method.paper}. Protects: {', '.join(method.levels)} level.\n"
        )
        rows = [f"`{h.name}` | `{h.default}` | {_cell(h.description)}" for h in method.hyperparameters]
        parts += _table("Hyperparameter | Default | Description", rows)
    return "\n".join(parts)


def python() -> str:
    import fedsweep
    import fedsweep.benchmark
    import fedsweep.plugins

    parts = ["# Python\n", f"{_without_stability(_doc(fedsweep))}\n", *_stability(fedsweep)]
    public = [name for name in fedsweep.__all__ if name != "__version__"]
    parts += [_documented(f"fedsweep.{name}", getattr(fedsweep, name)) for name in public]
    parts.append(_documented("fedsweep.benchmark.LiveTask", fedsweep.benchmark.LiveTask))
    parts.append(f"## fedsweep.plugins\n\n{_without_stability(_doc(fedsweep.plugins))}\n")
    parts += [_documented(f"fedsweep.plugins.{name}", getattr(fedsweep.plugins, name)) for name in PLUGIN_NAMES]
    return "\n".join(parts)


def _stability(package: ModuleType) -> list[str]:
    """How stable each public module is, from the paragraph of its docstring that starts with "Stability:"."""
    modules = [package, *(import_module(f"{package.__name__}.{m.name}") for m in iter_modules(package.__path__))]
    stated = {module.__name__: STABILITY.search(_doc(module)) for module in modules}
    rows = [f"`{name}` | {_cell(paragraph[1])}" for name, paragraph in stated.items() if paragraph]
    return ["## Stability\n", *_table("Module | Stability", rows)] if rows else []


def _without_stability(text: str) -> str:
    return STABILITY.sub("", text).strip()


def _documented(name: str, value: Any) -> str:
    if not inspect.isclass(value):
        return f"## {name}\n\n```python\n{name.rpartition('.')[2]}{_signature(value)}\n```\n\n{_doc(value)}\n"
    if issubclass(value, BaseModel):
        text = "A study, with the [study keys](study.md) as fields. `Study.model_validate(dict)` creates one."
        return f"## {name}\n\n{text}\n"
    public = {name: getattr(m, "__func__", m) for name, m in vars(value).items() if not name.startswith("_")}
    rows = [f"`{n}` | {_cell(_doc(m.fget))}" for n, m in public.items() if isinstance(m, property)]
    rows += [
        f"`{n}({', '.join(_parameters(m))})` | {_cell(_doc(m))}" for n, m in public.items() if inspect.isfunction(m)
    ]
    fields = [name for name in inspect.get_annotations(value) if not name.startswith("_")]
    rows += [f"`{attribute}` | {_cell(_under(value, attribute))}" for attribute in fields]
    table = "\n".join(_table("Member | Description", rows)) if rows else ""
    return f"## {name}\n\n{_doc(value)}\n\n{table}"


def _parameters(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name not in ("self", "cls")]


def _signature(value: Any) -> str:
    parameters = []
    for name, parameter in inspect.signature(value).parameters.items():
        default = "…" if callable(parameter.default) or "<" in repr(parameter.default) else repr(parameter.default)
        parameters.append(name if parameter.default is inspect.Parameter.empty else f"{name}={default}")
    return f"({', '.join(parameters)})"


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
