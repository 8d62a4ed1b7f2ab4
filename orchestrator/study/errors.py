"""Errors about settings of the study file: the path of the setting, which gives its line, and the wording."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from pydantic_core import ErrorDetails, PydanticCustomError

from orchestrator.section import Section
from trainables.errors import UserError


def invalid(sentence: str, *at: str | int) -> PydanticCustomError:
    """The error of a validator that checks several settings; `at`: the path of the setting at fault."""
    return PydanticCustomError("invalid", "{sentence}", {"sentence": sentence, "at": at})


class SettingError(UserError):
    """A setting that was found to be wrong after the file was read, such as when the data was loaded or partitioned."""

    def __init__(self, sentence: str, at: tuple[str | int, ...]) -> None:
        super().__init__(sentence)
        self.at = at
        """Path of the setting: section, then key or index."""


@contextlib.contextmanager
def errors_point_to(*at: str | int) -> Iterator[None]:
    """Turn user errors raised inside into errors about this setting."""
    try:
        yield
    except SettingError:
        raise
    except UserError as error:
        raise SettingError(str(error), at) from error


PLAIN = r"[\w./-][\w./:-]{0,40}"
"""Texts and numbers that need no quotation marks in YAML."""
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
}
"""What a setting should be, by the first word of pydantic's error type."""


def message(errors: list[ErrorDetails], *, show_input: bool = True) -> str:
    """A sentence for all errors of one setting: pydantic reports one for each type that the setting may have."""
    first = errors[0]
    if first["type"] == "missing":
        return "it is missing"
    found = f" (found {first['input']!r})" if show_input and isinstance(first["input"], str | int | float) else ""
    return f"{_sentence(errors)}{found}"


def _sentence(errors: list[ErrorDetails]) -> str:
    kinds = list(dict.fromkeys(kind for error in errors if (kind := _expected_kind(error))))
    if kinds:
        return f"it should be {' or '.join(kinds)}"
    first = errors[0]
    if first["type"] == "too_short":
        least = first["ctx"]["min_length"]
        return f"it should have at least {least} item{'s' if least > 1 else ''}"
    if first["type"] == "string_pattern_mismatch":  # `name` or `resources.accelerator`, which allows more than this
        return "it should be 1 to 64 letters (A-Z, a-z), digits or . _ - and begin with a letter or digit"
    return first["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)


def _expected_kind(error: ErrorDetails) -> str:
    kind, _, wrong = error["type"].partition("_")
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    if error["type"] == "list_type" and re.fullmatch(PLAIN, item := str(error["input"])):
        return f"a list, such as [{'.inf' if item == 'inf' else item}]"
    if error["type"] == "list_type" and isinstance(error["input"], dict):
        return "a list (each item begins with '- ')"
    if error["type"] == "model_type" and (keys := _first_keys(error["ctx"]["class_name"])):
        return f"a mapping with keys such as {keys}"
    return KINDS.get(kind, "") if wrong in ("parsing", "type", "from_float") else ""


def _first_keys(section: str) -> str:
    """The first keys of a section of the study file, by the name of its class; "" if there is none of this name."""
    return next((", ".join([*one.model_fields][:3]) for one in Section.__subclasses__() if one.__name__ == section), "")
