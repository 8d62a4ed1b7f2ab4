"""Errors that name a setting of the study file, so that the message can name its line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from trainables.errors import UserError


def invalid(sentence: str, *at: str | int) -> PydanticCustomError:
    """Raised by a validator that checks several settings; `at` is the path of the one to point to."""
    return PydanticCustomError("invalid", "{sentence}", {"sentence": sentence, "at": at})


class SettingError(UserError):
    """A setting that was found to be wrong after the file was read, when the data was loaded or partitioned."""

    def __init__(self, sentence: str, at: tuple[str | int, ...]) -> None:
        super().__init__(sentence)
        self.at = at
        """Path of the setting: section, then key or index."""


@contextlib.contextmanager
def errors_point_to(*at: str | int) -> Iterator[None]:
    """User errors raised inside are about this setting."""
    try:
        yield
    except SettingError:
        raise
    except UserError as error:
        raise SettingError(str(error), at) from error
