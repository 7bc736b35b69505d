"""Which faults are done: those that were asked for, or some drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tmover.demo.trace import Line
from tmover.errors import ConfigError
from tmover.worker.inject import Fault, parse

_KINDS = (Fault.KILL, Fault.KILLNODE, Fault.STOP, Fault.CUT)
_POINTS = (
    "step_open", "before_vote", "in_vote", "after_vote", "before_update", "after_update",
    "after_body",
)  # fmt: skip
"""Points that every script comes to in every step."""
FIRST_STEP = 2
"""A loss before that starts all workers afresh, which proves little."""


def check(faults: Sequence[str]) -> tuple[str, ...]:
    """Return the faults one by one. Raises `ConfigError` for what is none, or proves nothing."""
    found = tuple(part.strip() for text in faults for part in text.split(";") if part.strip())
    for one in found:
        try:
            (injection,) = parse(one)
        except ConfigError as error:
            raise ConfigError(str(error).replace("TMOVER_INJECT", "--faults", 1)) from error
        if injection.fault not in _KINDS:
            msg = f"--faults: {one!r} is no loss; give kill, killnode, stop or cut"
            raise ConfigError(msg)
    return found


def draw(seed: int, count: int, *, steps: int, world_size: int) -> tuple[str, ...]:
    """Return so many faults, on different ranks, of a job with `steps` steps.

    >>> draw(7, 1, steps=20, world_size=4) == draw(7, 1, steps=20, world_size=4)
    True
    """
    if steps <= FIRST_STEP:
        msg = f"the script has {steps} steps; to be verified it needs {FIRST_STEP + 1} or more"
        raise ConfigError(msg)
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    ranks = chance.sample(range(world_size), min(count, world_size))
    return tuple(
        f"{chance.choice(_KINDS).value}:rank={rank},"
        f"step={chance.randrange(FIRST_STEP, steps)},point={chance.choice(_POINTS)}"
        for rank in ranks
    )


def missed(faults: Sequence[str], lines: Sequence[Line]) -> tuple[str, ...]:
    """Return the faults that did not happen."""
    done = [(line.fault, line.point) for line in lines if line.event == "fault"]
    found = []
    for text in faults:
        (injection,) = parse(text)
        key = (injection.fault.value, injection.point.value)
        if key in done:
            done.remove(key)
        else:
            found.append(text)
    return tuple(found)
