"""The core touches nothing outside, so there is nothing that its tests could leave behind."""

import pytest


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Replace the search for leaks, which would take most of these tests' time."""
