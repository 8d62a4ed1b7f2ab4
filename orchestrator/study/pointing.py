"""Which setting of a study something that was found later is about: the sentence then names its file and line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainables.errors import UserError


class SettingError(UserError):
    """Found when data were loaded and dealt, not when the file was read."""

    def __init__(self, sentence: str, at: tuple[str | int, ...]) -> None:
        super().__init__(sentence)
        self.at = at
        """As in the file: section, then key or number."""


@contextlib.contextmanager
def about(*at: str | int) -> Iterator[None]:
    """What is wrong in here is about this setting."""
    try:
        yield
    except SettingError:
        raise
    except UserError as error:
        raise SettingError(str(error), at) from error
