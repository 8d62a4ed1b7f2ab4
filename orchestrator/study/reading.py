"""Reads study files: parses their YAML within limits, names file and line in errors, and finds their feature files."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

import search_spaces
from orchestrator.study.errors import SettingError, message
from orchestrator.study.settings.data import DataSettings
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.settings.resources import ResourceSettings
from orchestrator.study.study import Study
from trainables.data.importing.reading import is_table
from trainables.data.sources.fetching import data_folder
from trainables.errors import UserError
from trainables.files import read_plain_text
from trainables.limited_yaml import line_of, read_yaml
from trainables.methods import METHODS
from trainables.urls import as_user_error, fetch_text, shown_url


def packaged() -> list[str]:
    """Names of the packaged studies."""
    folder = resources.files("orchestrator.study") / "packaged"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load(name: str) -> tuple[Study, str]:
    """A study by path, URL or the name of a packaged one, and the text of its file."""
    if "://" in name:
        with as_user_error(f"study file {shown_url(name)} cannot be read"):
            text = fetch_text(name)
        return parse(text, name, None), text
    path = Path(name)
    if is_table(name) or path.suffix.lower() == ".npz":  # users sometimes pass their data in place of a study
        raise UserError(f"{name} is a data file, not a study; a study names it: data: [{name}]")
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            text = read_plain_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"study file {name} cannot be read: {reason}") from None
        return parse(text, str(path), path.resolve().parent), text
    if name in packaged():
        text = (resources.files("orchestrator.study") / "packaged" / f"{name}.yaml").read_text(encoding="utf-8")
        return parse(text, name, None), text
    raise UserError(f"study {name!r} is neither a file nor a packaged study ({', '.join(packaged())})")


def with_located_data(study: Study) -> Study:
    """A study that may have run on another machine: feature files that have moved are looked up by name, as for a new
    study. The ledger checks that their content is the same."""
    return study.model_copy(update={"data": [_relocate(data) for data in study.data]})


def _relocate(data: DataSettings) -> DataSettings:
    if not data.is_file or os.path.isfile(data.source):
        return data
    elsewhere = _locate(data.model_copy(update={"source": Path(data.source).name}), Path.cwd())
    return elsewhere if os.path.isfile(elsewhere.source) else data


def parse(text: str, file: str, folder: Path | None) -> Study:
    """The study with this text. `file`: the name of the study file in errors. `folder`: its folder, in which feature
    files and search spaces are looked up. None for a packaged study or one at a URL: its feature files are looked up in
    the current folder, and no file there changes its search spaces."""
    content, marks = read_yaml(text, file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: a study is a mapping of settings, this is {type(content).__name__}")
    content = content if folder is None else _with_search_spaces(content, folder)
    try:
        study = Study.model_validate(content)
    except ValidationError as error:
        place, sentence = first_error(error)
        raise UserError(f"{file}:{line_of(marks, place)}: {sentence}") from None
    return study.model_copy(update={"data": [_locate(data, folder or Path.cwd()) for data in study.data]})


@contextlib.contextmanager
def errors_name_lines(text: str, file: str) -> Iterator[None]:
    """Add the line in the study file to errors about settings that are found only after the file was read."""
    try:
        yield
    except SettingError as error:
        _, marks = read_yaml(text, file)
        raise UserError(f"{file}:{line_of(marks, error.at)}: {error}") from None


def _with_search_spaces(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Files named after a method, next to the study file, replace its packaged search space, unless the study sets
    `search_space`. Their content becomes part of the study, which can be resumed without them."""
    named = list(METHODS) if content.get("methods") == "all" else content.get("methods")
    if not isinstance(named, list):
        return content
    found: list[Any] = []
    for item in named:
        single = isinstance(item, dict) and len(item) == 1 and "name" not in item
        name = next(iter(item)) if single else item.get("name") if isinstance(item, dict) else item
        file = folder / search_spaces.file_name(name) if isinstance(name, str) and name in METHODS else None
        given = (item[name] or {}) if single else item if isinstance(item, dict) else {}
        if file is None or not file.is_file() or not isinstance(given, dict) or "search_space" in given:
            found.append(item)
            continue
        found.append({"name": name, **given, "search_space": _read_space(file, str(name))})
    return content if found == named else {**content, "methods": found}


def _read_space(file: Path, method: str) -> Any:
    """The content of a search space file. An error message has the line in that file."""
    space, marks = read_yaml(read_plain_text(file), str(file))
    try:
        MethodSettings.model_validate({"name": method, "search_space": space})
    except ValidationError as error:
        place, sentence = first_error(error)
        raise UserError(f"{file}:{line_of(marks, place[1:])}: {sentence.removeprefix('search_space.')}") from None
    return space


def from_mapping(content: Mapping[str, Any], called: str) -> Study:
    """A study from Python; feature files are looked up in the current folder. `called`: its name in error messages."""
    try:
        study = Study.model_validate(dict(content))
    except ValidationError as error:
        raise UserError(f"{called}: {first_error(error)[1]}") from None
    return study.model_copy(update={"data": [_locate(data, Path.cwd()) for data in study.data]})


def as_text(study: Study) -> str:
    """The text of a study file with this content."""
    return yaml.safe_dump(study.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)


def first_error(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The path of the first wrong setting, and a sentence about it."""
    found = error.errors()
    # a missing setting may be present under a misspelt name: then report that one
    misspelt = [e for e in found if e["type"] == "extra_forbidden" and _suggestion(e["loc"])]
    first = misspelt[0] if misspelt and found[0]["type"] == "missing" else found[0]
    place = (*first["loc"], *first.get("ctx", {}).get("at", ()))
    unknown = first["type"] == "extra_forbidden"
    name = ".".join(map(str, [*_visible(place[:-1]), place[-1]] if unknown else _visible(place)))
    if unknown:
        sentence = f"there is no such setting{_suggestion(place)}"
    elif first["type"] == "unknown_section":
        sentence = f"there is no such setting{_suggestion(place) or first['msg']}"
    else:
        sentence = message([e for e in found if _visible(e["loc"]) == _visible(first["loc"])])
    return place, f"{name + ': ' if name else ''}{sentence}"


def _visible(place: tuple[str | int, ...]) -> list[str | int]:
    """An error's location without the parts that pydantic adds."""
    return [part for part in place if not _internal(part)]


def _suggestion(place: tuple[str | int, ...]) -> str:
    """ "Did you mean" with the most similar setting, from the same section if possible; empty if there is none."""
    section, name = [part for part in _visible(place[:-1]) if isinstance(part, str)], str(place[-1])
    by_name: dict[str, list[str]] = {}
    for path in setting_paths(Study):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    completions = [known for known in by_name if len(name) > 2 and known.startswith(name)]
    for close in difflib.get_close_matches(name, by_name, n=1, cutoff=0.75) or completions[:1]:
        here = [path for path in by_name[close] if path.rpartition(".")[0] == ".".join(section)]
        return f"; did you mean {(here or by_name[close])[0]}?"
    return ""


def setting_paths(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """The full name of every setting, such as rounds.coarse."""
    for name, field in model.model_fields.items():
        yield f"{before}{name}"
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from setting_paths(inner, f"{before}{name}.")


def _locate(data: DataSettings, folder: Path) -> DataSettings:
    """The full path of a feature file, so that the study can be resumed from any folder. It is looked up next to the
    study file, in the current folder, and where `fedsweep data prepare` writes it: $FEDSWEEP_DATA or the cache."""
    if not data.is_file:
        return data
    places = [folder, Path.cwd(), data_folder()]
    # unlike Path.is_file, False for a name that no file can have
    found = [place / data.source for place in places if os.path.isfile(place / data.source)]
    return data.model_copy(update={"source": str(found[0].resolve())}) if found else data


def changed_resources(of: ResourceSettings, settings: list[str]) -> ResourceSettings:
    """The resources with some settings changed by KEY=VALUE."""
    content = of.model_dump()
    for text in settings:
        key, _, value = text.partition("=")
        if key not in content:
            raise UserError(f"resource {text!r} is not KEY=VALUE with a key of: {', '.join(content)}")
        content[key] = value
        try:
            ResourceSettings.model_validate({key: value})
        except ValidationError as error:
            raise UserError(f"resource {text!r}: {message(error.errors(), show_input=False)}") from None
    return ResourceSettings.model_validate(content)


def _internal(part: str | int) -> bool:
    """Whether pydantic added this part of an error's location, such as the branch of a union."""
    return isinstance(part, str) and (part in ("int", "float", "str", "bool") or "[" in part)
