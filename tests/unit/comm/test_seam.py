"""Which versions of torch are tested, and where that is said."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import documents
from tmover.comm import seam


def test_the_tested_versions_are_those_the_documents_name() -> None:
    text = (documents.ROOT / "docs" / "operations.md").read_text()
    section = text.partition("## Versions of torch")[2].partition("\n## ")[0]

    assert tuple(re.findall(r"^\| ([\d.]+)", section, re.MULTILINE)) == seam.TESTED


def test_the_pinned_version_is_a_tested_one() -> None:
    pinned = re.findall(r"^torch==(\S+)", (documents.ROOT / "constraints.txt").read_text(), re.M)

    assert len(pinned) == 1
    assert pinned[0] in seam.TESTED


def test_these_tests_run_on_a_tested_version() -> None:
    assert seam.doubt(torch.__version__) == ""


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "2.14.10", "3.0.0a0+git1234"])
def test_any_other_version_is_doubted_by_name(version: str) -> None:
    said = seam.doubt(version)

    assert said.startswith(f"torch {version} is untested")
    assert all(tested in said for tested in seam.TESTED)


def test_a_tested_version_is_known_whatever_it_was_built_for() -> None:
    assert seam.doubt("2.14.1+cu130") == ""


def test_the_doubt_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    seam.warn_if_untested.cache_clear()

    with caplog.at_level(logging.WARNING, "tmover"):
        seam.warn_if_untested()
        seam.warn_if_untested()
    seam.warn_if_untested.cache_clear()

    assert [record.getMessage() for record in caplog.records] == [seam.doubt("9.9.9")]
