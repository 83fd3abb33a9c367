"""All targets by name."""

from __future__ import annotations

from tools.fuzz import files, messages, texts

TARGETS = {target.name: target for target in (*files.TARGETS, *texts.TARGETS, *messages.TARGETS)}
