"""Exceptions in methods, models, partitions and data sources: what was raised, in which file and line, and the
traceback, which begins in the user's code."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from trainables.errors import UserError

OWN_FOLDERS = tuple(
    Path(__file__).resolve().parent.with_name(name) for name in ("trainables", "orchestrator", "fedsweep")
)
LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
ENVIRONMENT_ERRORS = ("OutOfMemoryError", "AcceleratorError", "ClientStateLostError")
"""Names of exceptions that another attempt may avoid. Names, because torch is not imported here."""


class PluginError(UserError):
    """The first line is a sentence, the others are the traceback. An exception of this type is treated as
    deterministic and not retried."""


@contextlib.contextmanager
def plugin_errors(what: str, *, retry_environment: bool = False) -> Iterator[None]:
    """Turn exceptions of `what` (such as "method dp-mine") into `PluginError`. `retry_environment`: leave only
    errors of the machine as they are, such as a full disk or too little memory, because another attempt may succeed.
    Without it, leave only a `UserError` as it is."""
    try:
        yield
    except PluginError:
        raise
    except Exception as error:
        if _is_transient(error) if retry_environment else isinstance(error, UserError):
            raise
        raise PluginError(_text(what, error)) from error


def _is_transient(error: Exception) -> bool:
    return isinstance(error, MemoryError | OSError) or type(error).__name__ in ENVIRONMENT_ERRORS


def _text(what: str, error: Exception) -> str:
    """The traceback begins where code of the user was called. Without such code there is only the sentence."""
    frames = list(traceback.extract_tb(error.__traceback__))
    of_user = [i for i, frame in enumerate(frames) if _is_of_user(frame.filename)]
    last = frames[of_user[-1] if of_user else -1]
    place = f"{last.filename}, line {last.lineno}"
    message = " ".join(str(error).split())
    sentence = f"{what} raised {type(error).__name__}{': ' if message else ''}{message[:500]} ({place})"
    if not of_user:
        return sentence
    trace = "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames[of_user[0] :])])
    return f"{sentence}\n{trace}{type(error).__name__}: {error}"


def _is_of_user(filename: str) -> bool:
    path = Path(filename).resolve()
    return path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in (*OWN_FOLDERS, *LIBRARIES))
