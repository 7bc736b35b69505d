"""How an agent presents itself: its name, and the address its workers listen at."""

from __future__ import annotations

import contextlib
import secrets
import socket

from tmover.controller.client import read_address
from tmover.core.events import Joined
from tmover.environment import AgentEnvironment
from tmover.errors import TmoverError

LOOPBACK = "127.0.0.1"


def introduce(place: AgentEnvironment, nproc: int) -> Joined:
    """Return what this agent says of itself. The random part makes it unlike any before it."""
    return Joined(
        job=place.job,
        agent=f"{place.node}-{secrets.token_hex(4)}",
        node=place.node,
        address=place.address or _own_address(place),
        nproc=nproc,
        standby=place.standby,
        slot=place.slot,
    )


def _own_address(place: AgentEnvironment) -> str:
    """Return the address of this machine that routes to the controller."""
    with contextlib.suppress(OSError, ValueError, TmoverError):
        host, _, port = read_address(place.state).address.rpartition("//")[2].rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing: it only asks for the route
            return str(probe.getsockname()[0])
    return LOOPBACK
