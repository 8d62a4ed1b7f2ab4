"""Writes files without following links, and reads plain files only.

A results folder may come from anyone, and may hold links to files elsewhere. Files that are replaced are written under
a new name and renamed, which replaces a link and leaves its target alone. Files that are written in place, and folders
inside a results folder, are refused if they are links.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from trainables.errors import UserError

PUBLIC, PRIVATE = 0o666, 0o600
"""Permissions of a new file; the umask restricts the first."""
MOST_LINKS = 40  # on the way to a file, as in Linux
PRIVATE_FOLDER = 0o700
LONGEST_TEXT = 1 << 26  # bytes
FOLDER = "FEDSWEEP_FOLDER"


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = PUBLIC, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` at the end of the block: a reader never sees half of it. `durable`: flush
    it to disk (fsync) before it takes that place."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None or str(error.filename) == str(temporary):
            error.filename, error.filename2 = str(path), None  # the name that the user knows
        raise
    finally:
        with contextlib.suppress(OSError):  # an error here must not hide the first one
            temporary.unlink(missing_ok=True)


def open_in_place(path: Path, flags: int, mode: int = PUBLIC) -> int:
    """The descriptor of an existing or new file that is written in place, such as a lock or a log."""
    refuse_link(path)
    # O_NONBLOCK: a pipe would block
    safe = (flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC) & ~os.O_TRUNC
    descriptor = os.open(path, safe, mode)
    if problem := _problem(os.fstat(descriptor)):
        os.close(descriptor)
        raise UserError(f"{path} {problem}, and nothing is written to it")
    if flags & os.O_TRUNC:  # not before the check
        os.ftruncate(descriptor, 0)
    return descriptor


def open_plain(path: Path, *, follow: bool = False) -> IO[bytes]:
    """A file to read. Pipes and devices, which may block or never end, are refused. `follow`: it may be a link."""
    if not follow and path.is_symlink():
        raise UserError(f"{path} is a symbolic link")
    # O_NONBLOCK: opening a pipe would block
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a plain file")
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The content of a file. More than `most` bytes are refused: a sparse file can be larger than the disk."""
    with open_plain(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UserError(f"{path} is larger than {most:,} bytes")
        return file.read(size)


def read_plain_text(path: Path) -> str:
    """The UTF-8 text of a file that the user or a results folder names."""
    return io.StringIO(read_plain(path, LONGEST_TEXT, follow=True).decode("utf-8"), newline=None).read()


def _problem(status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "is not a plain file"
    return "has several names (hard links)" if status.st_nlink > 1 else ""


def refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, and nothing is written through one")


def refuse_other_names(path: Path) -> None:
    """For a file that a library writes in place: refuse links of both kinds, pipes and devices. The file need not
    exist."""
    refuse_link(path)
    with contextlib.suppress(FileNotFoundError):
        if problem := _problem(path.stat()):
            raise UserError(f"{path} {problem}, and nothing is written to it")


def subfolder(folder: Path, *names: str) -> Path:
    """A folder inside a results folder, made if it does not exist. The results folder itself may be a link."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        folder = folder / name
        refuse_link(folder)
        folder.mkdir(exist_ok=True)
    return folder


def current_folder() -> Path:
    """The folder that the command runs in. Workers of a local Ray run in another, and read $FEDSWEEP_FOLDER."""
    return Path(os.environ.get(FOLDER) or Path.cwd())


def user_folder(variable: str, *default: str) -> Path:
    """fedsweep's folder in the folder that `variable` names ($XDG_CACHE_HOME or $XDG_STATE_HOME), or in `default` in
    the home folder. Relative paths are ignored, as in the XDG specification: they depend on the current folder, which
    may come from anyone."""
    chosen = Path(os.environ.get(variable, ""))
    if not chosen.is_absolute():
        chosen = Path.home().joinpath(*default)
    if not chosen.is_absolute():
        raise RuntimeError(f"there is no home folder: {chosen} is not an absolute path")
    return chosen / "fedsweep"


def trusted_user_folder(variable: str, *default: str) -> Path:
    """`user_folder` for files that are executed or trusted; it is made if it does not exist. Raises RuntimeError if
    another user can replace its content, for example because sudo kept that user's $HOME."""
    folder = user_folder(variable, *default)
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    if (other := replaceable_part(folder)) is not None:
        raise RuntimeError(f"another user can replace {other}")
    return folder


def replaceable_part(path: Path) -> Path | None:
    """The first folder, file or link on the way to `path` that belongs to neither this user nor root, or that everyone
    may write to (except sticky folders), or the link after MOST_LINKS others. None if there is none; parts after one
    that does not exist are not checked."""
    current, parts, links = Path("/"), list(path.absolute().parts[:0:-1]), 0
    while parts:
        part = parts.pop()
        place = current.parent if part == ".." else current / part
        try:
            status = place.lstat()
        except FileNotFoundError:
            return None
        if status.st_uid not in (0, os.geteuid()):
            return place
        if stat.S_ISLNK(status.st_mode):
            target, links = place.readlink(), links + 1
            if links > MOST_LINKS:
                return place
            current = Path("/") if target.is_absolute() else current
            parts += [part for part in target.parts[::-1] if part != "/"]
        elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return place
        else:
            current = place
    return None


def is_private(path: Path, kind: int) -> bool:
    """Whether `path` is of this kind (`stat.S_IFREG` or `stat.S_IFDIR`), is this user's and is closed to others."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_private(folder: Path, *names: str) -> None:
    """Close a folder, and files in it, to other users."""
    for name in names:
        refuse_other_names(folder / name)
    for path, mode in ((folder, PRIVATE_FOLDER), *((folder / name, PRIVATE) for name in names)):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                _restrict(path, mode)


def _restrict(path: Path, mode: int) -> None:
    if path.stat().st_uid != os.geteuid():
        raise UserError(f"{path} belongs to another user and is open to others: choose a folder of your own")
    path.chmod(mode)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
