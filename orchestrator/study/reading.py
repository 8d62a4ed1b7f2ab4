"""Reading a study file: YAML with limits, errors with file and line, feature files found where they lie."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from orchestrator.study.settings import DataSettings, ResourceSettings, Study
from trainables.data.sources.fetching import data_folder
from trainables.errors import UserError


def packaged() -> list[str]:
    """The names of the studies that come with the package."""
    folder = resources.files("orchestrator.study") / "packaged"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load(name: str) -> tuple[Study, str]:
    """A study by path or by the name of a packaged one, and its text."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"study file {name} cannot be read: {reason}") from None
        return parse(text, str(path), path.resolve().parent), text
    if name in packaged():
        text = (resources.files("orchestrator.study") / "packaged" / f"{name}.yaml").read_text(encoding="utf-8")
        return parse(text, name, Path.cwd()), text
    raise UserError(f"study {name!r} is neither a file nor a packaged study ({', '.join(packaged())})")


def parse(text: str, file: str, folder: Path) -> Study:
    """Feature files are looked for beside the study file."""
    try:
        content = yaml.safe_load(text)
        marks = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise UserError(f"{file}: not valid YAML: it is nested without end") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not valid YAML: {problem}") from None
    _refuse_repeated_keys(marks, file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: a study is a mapping of settings, this is {type(content).__name__}")
    try:
        study = Study.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        line = _line(marks, first["loc"])
        name = ".".join(str(part) for part in first["loc"] if not _internal(part))
        message = first["msg"].removeprefix("Value error, ")
        shown = f" (found {first['input']!r})" if isinstance(first["input"], str | int | float) else ""
        raise UserError(f"{file}:{line}: {name + ': ' if name else ''}{message}{shown}") from None
    return study.model_copy(update={"data": [_located(data, folder) for data in study.data]})


def _refuse_repeated_keys(node: Any, file: str) -> None:
    """YAML lets the last one win in silence."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise UserError(f"{file}:{key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)
            _refuse_repeated_keys(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, file)


def _located(data: DataSettings, folder: Path) -> DataSettings:
    """A feature file by its whole path, so that the study can be resumed from anywhere. It is looked for beside the
    study file, in the current folder, and where `fedsweep data prepare` puts it: in $FEDSWEEP_DATA or the cache."""
    if not data.source.endswith(".npz"):
        return data
    places = [folder, Path.cwd(), data_folder()]
    found = [place / data.source for place in places if (place / data.source).is_file()]
    return data.model_copy(update={"source": str(found[0].resolve())}) if found else data


def changed_resources(of: ResourceSettings, settings: list[str]) -> ResourceSettings:
    """With some settings given as KEY=VALUE."""
    content = of.model_dump()
    for text in settings:
        key, _, value = text.partition("=")
        if key not in content:
            raise UserError(f"resource {text!r} is not KEY=VALUE with a key of: {', '.join(content)}")
        content[key] = value
        try:
            ResourceSettings.model_validate({key: value})
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"resource {text!r}: {message}") from None
    return ResourceSettings.model_validate(content)


def _internal(part: str | int) -> bool:
    """Names of pydantic's own making in an error's location, such as the branch of a union."""
    return isinstance(part, str) and (part in ("int", "float", "str", "bool") or "[" in part)


def _line(node: Any, location: tuple[str | int, ...]) -> int:
    """The line of the deepest part of the location that stands in the file."""
    line = node.start_mark.line if node is not None else 0
    for part in location:
        if isinstance(node, yaml.MappingNode):
            entries = [(key, value) for key, value in node.value if key.value == str(part)]
            if not entries and len(node.value) == 1:  # `- dp-fedsofim: {…}`: one step down, the same part again
                node = node.value[0][1]
                entries = (
                    [(k, v) for k, v in node.value if k.value == str(part)]
                    if isinstance(node, yaml.MappingNode)
                    else []
                )
            if not entries:
                break
            key, node = entries[0]
            line = key.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1
