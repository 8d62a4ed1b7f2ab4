"""The version of the installed package."""

from importlib import metadata


def version() -> str:
    """The version, or "unknown" in a checkout that is not installed."""
    try:
        return metadata.version("fedsweep")
    except metadata.PackageNotFoundError:
        return "unknown"
