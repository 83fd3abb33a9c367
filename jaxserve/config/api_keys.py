"""API keys and the tenants they stand for.

A file of keys has one a line: `key`, or `tenant:key`. What stands before the first colon is the tenant, so a key
that holds a colon and has no tenant is written `:key`. Blank lines and lines that begin with # are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_TENANT_CHARS = 256


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients send.

    Attributes:
      key: the secret; kept out of `repr`.
      tenant: whose requests it makes; "": the request may name any.
    """

    key: str = field(repr=False)
    tenant: str = ""


def read_api_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises:
      ValueError: naming file, line and rule, never a key.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"names a file that cannot be read: {path}: {error}") from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        before, colon, after = text.partition(":")
        tenant, key = (before.strip(), after.strip()) if colon else ("", before)
        where = f"file {path}, line {number}"
        if not key or any(character.isspace() for character in key):
            raise ValueError(f"{where}: must be key or tenant:key, the key without blanks")
        if len(tenant) > MAX_TENANT_CHARS:
            raise ValueError(f"{where}: the tenant has {len(tenant)} characters; the limit is {MAX_TENANT_CHARS}")
        if key in keys:
            raise ValueError(f"{where}: the key has been given before")
        keys[key] = ApiKey(key, tenant)
    if not keys:
        raise ValueError(f"file {path} has no key; leave the flag out to serve without one")
    return tuple(keys.values())


def merged_keys(key: str | None, listed: Sequence[ApiKey]) -> tuple[ApiKey, ...]:
    """A single key, which has no tenant, and those of a file.

    Raises:
      ValueError: the single key is in the file too.
    """
    if key is None:
        return tuple(listed)
    if any(each.key == key for each in listed):
        raise ValueError("api_key is also in api_key_file; give it once")
    return (ApiKey(key), *listed)
