"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The installed version; "0" where the package is not installed."""
    try:
        return version("jaxserve")
    except PackageNotFoundError:
        return "0"
