"""Collectives that inductor compiles: what it makes of them runs over our links too."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch._inductor.config

from integration.comm.harness import in_world
from integration.comm.parity.case import plain, sample
from integration.comm.parity.functional import step


def test_functional_collectives_are_compiled_by_inductor() -> None:
    def program(rank: int, _size: int) -> Any:
        warnings.simplefilter("ignore")  # of names that torch would have new ones for
        with torch._inductor.config.patch(compile_threads=1):  # a pool would outlive the test
            compiled = torch.compile(step, fullgraph=True)(sample(rank, 4))
        return plain(compiled), plain(step(sample(rank, 4)))

    for compiled, eager in in_world(program, 2).values():
        assert compiled == eager
