"""URLs that fsspec opens, such as s3://bucket/folder or file:///nfs/x."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainables.errors import UserError


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path on it."""
    import fsspec

    protocol = url.partition("://")[0]
    options = {"auto_mkdir": True} if protocol == "file" else {}  # object storage has no folders; never create a bucket
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError:
        packages = {"s3": "'fedsweep[s3]'", "gs": "gcsfs", "abfs": "adlfs"}
        package = packages.get(protocol, f"what fsspec needs for {protocol}://")
        raise UserError(f"{url} needs a package that is not installed: pip install {package}") from None
    except Exception as error:  # each file system raises its own exception types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{url if url.isprintable() else repr(url)} cannot be opened: {reason}") from None
    if not root.strip("/"):
        raise UserError(f"{url} names no folder")
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
        raise UserError(f"{message}: {reason.rstrip('.')}") from error
