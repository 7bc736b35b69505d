"""Ranks of one host speak over Unix sockets, where they can and may."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from torch import distributed as dist

from integration.comm.harness import Board, in_fabrics
from tmover.comm import nearby
from tmover.comm.fabric import Fabric


def families(fabric: Fabric, _board: Board, _name: str) -> dict[str, bool]:
    """Return which lanes are Unix sockets, once all have been used."""
    ones = torch.ones(300_000)
    dist.all_reduce(ones)
    other = 1 - dist.get_rank()
    sent = dist.isend(ones, other)
    dist.recv(ones, other)
    assert sent is not None
    sent.wait()
    assert ones[0] == ones[-1] == 2
    fabric.exchange(b"done")
    (peer,) = fabric.present().peers.values()
    return {lane.use: link.sock.family == socket.AF_UNIX for lane, link in peer.lanes.items()}


def test_all_but_the_control_links_stay_inside_the_host() -> None:
    found = in_fabrics(families, 2)

    inside = {"vote": True, "data": True, "message": True, "received": True, "control": False}
    assert found == {"n0": inside, "n1": inside}


def test_with_nearby_off_every_link_is_tcp() -> None:
    found = in_fabrics(families, 2, nearby=False)

    assert not any(family for lanes in found.values() for family in lanes.values())


def test_a_name_that_is_taken_leaves_tcp() -> None:
    """Somebody has the Unix name of an endpoint already: it is not listened on."""
    endpoint = f"192.0.2.1:{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0tmover/{endpoint}")

        assert nearby.listen(endpoint) is None
        assert nearby.connect(endpoint) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's name")
def test_a_listener_of_another_user_is_no_neighbour() -> None:
    endpoint = f"192.0.2.2:{os.getpid()}"
    ready, tell = os.pipe()
    wait, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        os.setuid(65534)
        door = nearby.listen(endpoint)
        os.write(tell, b"." if door else b"!")
        os.read(wait, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"."
        assert nearby.connect(endpoint) is None
    finally:
        os.close(end)
        os.waitpid(pid, 0)
        for fd in (ready, tell, wait):
            os.close(fd)
