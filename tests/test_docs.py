"""The pages that are written from tests, and the tests that pages name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from families import MEDIA, TEXT
from matrix import PAGE, page

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def test_the_page_of_models_is_current() -> None:
    """``PYTHONPATH=src:tests python tests/matrix.py`` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_readme_counts_the_families() -> None:
    counts = f"{len(TEXT)} families of text models and hybrids, {len(MEDIA)} that see or hear"
    assert counts in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["models.md", "user-reports.md"])
def test_tests_that_are_named_exist(name: str) -> None:
    found = NAMED.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert found
    there = {file: functions(ROOT / file) for file, _ in found}
    assert [f"{file}::{test}" for file, test in found if test not in there[file]] == []


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
