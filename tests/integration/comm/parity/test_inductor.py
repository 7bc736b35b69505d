"""Collectives that inductor compiles: what it makes of them runs over our links too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._inductor.config

from integration.comm.harness import in_world
from integration.comm.parity.case import plain, sample
from integration.comm.parity.functional import step

COMPILED_S = 500
"""A C++ compiler needs seconds for torch's headers, and minutes on a busy machine."""


@pytest.mark.timeout(COMPILED_S + 60)
def test_functional_collectives_are_compiled_by_inductor() -> None:
    def program(rank: int, _size: int) -> Any:
        warnings.simplefilter("ignore")  # of names that torch would have new ones for
        settings = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
        with torch._inductor.config.patch(settings):  # a pool would outlive the test
            compiled = torch.compile(step, fullgraph=True)(sample(rank, 4))
        return plain(compiled), plain(step(sample(rank, 4)))

    for compiled, eager in in_world(program, 2, deadline_s=COMPILED_S).values():
        assert compiled == eager
