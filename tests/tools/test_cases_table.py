"""docs/cases.md names tests that exist, and a test for every case."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`([^`]+::[^`]+)`")


def cases():
    """(id, tests named) of every row."""
    rows = [line.split(" | ") for line in (ROOT / "docs" / "cases.md").read_text().splitlines()]
    return [(row[0].removeprefix("| "), TEST.findall(row[-1])) for row in rows if re.match(r"\| [A-Z]+-\d+$", row[0])]


@cache
def names_in(path):
    """Names of the test functions of a file, a class before those of its methods; read, not run."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize(("case", "tests"), cases(), ids=[case for case, _ in cases()])
def test_every_case_has_tests_that_exist(case, tests):
    assert tests, f"{case} names no test"
    for each in tests:
        path, name = each.split("::", 1)
        assert (ROOT / path).is_file(), each
        assert name.split("::")[-1].startswith("test_") and name in names_in(path), each


def test_cases_stand_there_once():
    names = [case for case, _ in cases()]
    assert len(names) == len(set(names)) >= 50
