"""URLs that fsspec opens, such as s3://bucket/folder or file:///nfs/x."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainables.errors import UserError
from trainables.files import LONGEST_TEXT, read_plain_text, refuse_link, refuse_other_names

OPENED = (
    *("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"),
    *("hdfs", "http", "https", "hf"),
)
"""Schemes of plain storage. fsspec has others that interpret what they read: `reference` renders templates and reads
the files that they name, archives expand without limit, and caches write to other folders. `smb`, `ssh` and `sftp` log
in with the user's password or keys at any host that a study names, and accept any host key."""
_SEPARATOR = r"\s,;|\"'`()<>\[\]{}="
# the scheme has a maximum length: without it, a long text takes minutes
_NEXT_URL = re.compile(rf"(?<![^{_SEPARATOR}])[A-Za-z][A-Za-z0-9+.-]{{,50}}://")
_PORT = re.compile(r"[^\s:]*:[0-9]*")
_CLOSING = r",;.)\]}\"'`>"
_QUERY = re.compile(r"\?.*?(?=[,;\s]*$)", re.DOTALL)
_QUERY_IN_TEXT = re.compile(rf"\?[{_CLOSING}]*[^\s{_CLOSING}]\S*?(?=[{_CLOSING}]*(?:\s|$))")


def shown(text: str) -> str:
    """A text for people: its URLs without user names, passwords and queries, which may hold credentials.

    A password may hold any character: where there may be one, everything up to the last @ of the line is removed."""
    return "\n".join(_shown(line, _QUERY_IN_TEXT) for line in text.split("\n")) if "://" in text else text


def shown_url(url: str) -> str:
    """As `shown`, for a value that is one URL, or a list of them: a query ends before the next URL or with the
    value."""
    return _shown(url, _QUERY)


def _shown(text: str, query: re.Pattern[str]) -> str:
    first, last_at = text.find("://"), text.rfind("@")
    if first < 0:
        return text
    begin = first + len("://")
    parts = [text[:begin]]
    for following in _NEXT_URL.finditer(text, begin):
        end = following.start()
        if end < last_at and _may_continue(text, begin, end):
            continue
        parts += [query.sub("", _without_user(text[begin:end])), following[0]]
        begin = following.end()
    return "".join([*parts, query.sub("", _without_user(text[begin:]))])


def _may_continue(text: str, begin: int, end: int) -> bool:
    """Whether what looks like another URL at `end` may be part of a password."""
    slash = text.find("/", begin, end)
    host = text[begin : end if slash < 0 else slash]
    return ":" in host and not _PORT.fullmatch(host) and text.find("@", begin, end) < 0


def _without_user(url: str) -> str:
    """Remove the user name and password: everything up to the last @. After a colon, the @ may follow a slash, because
    a password may hold slashes and begin like a port."""
    host = url.partition("/")[0]
    return url.rpartition("@")[2] if "@" in host or ":" in host else url


def check_scheme(url: str) -> None:
    """Refuse schemes that are not in `OPENED`, and `::`, with which fsspec chains file systems."""
    if "::" in url or url.partition("://")[0] not in OPENED:
        raise UserError(f"{_printable(url)} is not a URL that fedsweep opens; the schemes are {', '.join(OPENED)}")


def _printable(url: str) -> str:
    return shown_url(url) if url.isprintable() else repr(shown_url(url))


def is_local(files: Any) -> bool:
    return "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,))


def rename(files: Any, old: str, new: str) -> None:
    """Rename a file, replacing `new`. If `new` is a link to a folder, fsspec would move the file into that folder."""
    if is_local(files):
        os.replace(old, new)
    else:
        files.mv(old, new)


def refuse_links(files: Any, root: str, *names: str) -> None:
    """In a folder on this machine, refuse links, pipes and devices with these names (any file extension), also inside
    subfolders with these names: fsspec would write through links, and wait for a pipe."""
    if is_local(files) and os.path.isdir(root):
        for path in Path(root).iterdir():
            if path.name in names or path.name.startswith(tuple(f"{name}." for name in names)):
                refuse_link(path)
                for found in (path, *path.rglob("*")):
                    refuse_link(found)
                    if not found.is_dir():
                        refuse_other_names(found)


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path on it."""
    import fsspec

    check_scheme(url)
    protocol = url.partition("://")[0]
    options = {"auto_mkdir": True} if protocol == "file" else {}  # object storage has no folders; never create a bucket
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError:
        packages = {"s3": "'fedsweep[s3]'", "gs": "gcsfs", "abfs": "adlfs"}
        package = packages.get(protocol, f"what fsspec needs for {protocol}://")
        raise UserError(f"{shown_url(url)} needs a package that is not installed: pip install {package}") from None
    except Exception as error:  # each file system raises its own exception types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{_printable(url)} cannot be opened: {shown(reason)}") from None
    if not root.strip("/"):
        raise UserError(f"{shown_url(url)} names no folder")
    return files, root.rstrip("/")


def fetch_text(url: str) -> str:
    files, path = open_filesystem(url)
    if is_local(files):
        return read_plain_text(Path(path))
    if (files.size(path) or 0) > LONGEST_TEXT:
        raise UserError(f"{shown_url(url)} is larger than {LONGEST_TEXT:,} bytes")
    return files.cat_file(path, end=LONGEST_TEXT).decode()


@contextlib.contextmanager
def as_user_error(message: str) -> Iterator[None]:
    """Turn any exception into a `UserError`: the message, then the reason. Each file system raises its own types."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise UserError(shown(f"{message}: {reason.rstrip('.')}")) from error
