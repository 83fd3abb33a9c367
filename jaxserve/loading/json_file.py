"""Reading the JSON files that lie beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.core import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      CheckpointError: the file is missing, unreadable or not a JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; it must hold a JSON object")
    return value
