"""Adapter: a LoRA adapter as an engine has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """One loading of an adapter.

    Attributes:
      name: what requests call it.
      path: the folder it was read from.
      number: which loading it is, from 1 on; a name that is loaded again has another one.
      place: where it lies on the device, from 1 on.
      created: seconds since 1970.
    """

    name: str
    path: str
    number: int
    place: int
    created: int
