"""Fuzzing of the readers of files and messages: docs/reliability.md has the commands."""
