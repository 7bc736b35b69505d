"""The documents say what the code does."""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess

import msgspec
import pytest

import documents
from tmover.config import Config
from tmover.worker.inject import Fault, Point

ROOT = documents.ROOT
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md"), *ROOT.glob("docs/*/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_resolves(page: pathlib.Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_command_reference_is_what_help_says() -> None:
    assert documents.CLI.read_text() == documents.cli_reference(), "run `make docs`"


def test_the_configuration_file_shows_every_key_with_its_default() -> None:
    text = (ROOT / "conf" / "tmover.toml").read_text()

    assert msgspec.toml.decode(text) == msgspec.json.decode(msgspec.json.encode(Config()))


def test_operations_names_every_fault_and_every_point() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    words = set(re.findall(r"`([a-z_]+)`", text))

    assert {fault.value for fault in Fault} <= words
    assert {point.value for point in Point} <= words


def test_the_readme_is_short_and_its_targets_exist() -> None:
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()

    assert len(text.splitlines()) <= 150
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_the_makefile_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True
    ).stdout

    assert len(makefile.splitlines()) <= 95
    assert targets == set(re.findall(r"^  ([a-z-]+) ", shown, re.MULTILINE))


def test_every_guarantee_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| (?!promise)", line)]
    named = [re.findall(r"`([\w/]+\.py)::(\w+)`", row) for row in rows]

    assert len(rows) > 20
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    for file, test in itertools.chain(*named):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_the_diagram_of_phases_is_the_one_decide_draws() -> None:
    assert documents.drawn() == documents.diagram(), "run `make docs`"
