"""URLs that fsspec opens: s3://bucket/folder, file:///nfs/x."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainables.errors import UserError


def open_filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path there."""
    import fsspec

    kind = url.partition("://")[0]
    options = {"auto_mkdir": True} if kind == "file" else {}  # object storage has no folders; a bucket is never made
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError:
        package = {"s3": "'fedsweep[s3]'", "gs": "gcsfs", "abfs": "adlfs"}.get(kind, f"what fsspec needs for {kind}://")
        raise UserError(f"{url} needs a package that is not installed: pip install {package}") from None
    except Exception as error:  # every kind of storage fails in its own way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{url if url.isprintable() else repr(url)} cannot be opened: {reason}") from None
    if not root.strip("/"):
        raise UserError(f"{url} names no folder")
    return files, root.rstrip("/")


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Every kind of storage has errors of its own; here they become one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise UserError(f"{what}: {reason.rstrip('.')}") from error
