"""URLs that fsspec opens, such as s3://bucket/folder or file:///nfs/x."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainables.errors import UserError
from trainables.files import refuse_link, refuse_other_names

OPENED = (
    *("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"),
    *("hdfs", "http", "https", "hf"),
)
"""Schemes of plain storage. fsspec has others that interpret what they read: `reference` renders templates and reads
the files that they name, archives expand without limit, and caches write to other folders. `smb`, `ssh` and `sftp` log
in with the user's password or keys at any host that a study names, and accept any host key."""
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{,50}://"  # without a limit, a long word takes minutes
_URL = re.compile(rf"({_SCHEME})((?:(?!{_SCHEME})[^\s\"<>`])*)")  # the next URL may follow a comma


def shown(text: str) -> str:
    """A text for people: its URLs without user names, passwords and queries, which may hold credentials."""
    return _URL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    """A password may hold a ': only a URL that begins with one ends before the last."""
    url, quote, after = match[2].rpartition("'")
    if not quote or match.string[: match.start()][-1:] != "'":
        url, quote, after = match[2], "", ""
    return match[1] + _without_credentials(url) + quote + after


def _without_credentials(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if "@" in host:  # a password may hold a question mark
        return host.rpartition("@")[2] + slash + path.partition("?")[0]
    after_colon = host.partition(":")[2]
    if "@" in path and after_colon and not after_colon.isdecimal():  # a password with a slash, not a port
        return path.partition("@")[2].partition("?")[0]
    return rest.partition("?")[0]


def check_scheme(url: str) -> None:
    """fsspec joins file systems with `::`."""
    if "::" in url or url.partition("://")[0] not in OPENED:
        raise UserError(f"{_printable(url)} is not a URL that fedsweep opens; the schemes are {', '.join(OPENED)}")


def _printable(url: str) -> str:
    return shown(url) if url.isprintable() else repr(shown(url))


def is_local(files: Any) -> bool:
    return "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,))


def rename(files: Any, old: str, new: str) -> None:
    """Put a file in the place of another. fsspec would move it into a folder that a link names."""
    if is_local(files):
        os.replace(old, new)
    else:
        files.mv(old, new)


def refuse_links(files: Any, root: str, *names: str) -> None:
    """If this is a folder on this machine, refuse links in it, and in its folders of these names: fsspec would write
    through them."""
    if is_local(files):
        for path in (Path(root) / name for name in names):
            refuse_link(path)
            for found in [path] if path.is_file() else path.rglob("*"):
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
        raise UserError(f"{shown(url)} needs a package that is not installed: pip install {package}") from None
    except Exception as error:  # each file system raises its own exception types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{_printable(url)} cannot be opened: {shown(reason)}") from None
    if not root.strip("/"):
        raise UserError(f"{shown(url)} names no folder")
    return files, root.rstrip("/")


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
