"""Machines for ranks in tests: network namespaces, each with its own cable to one switch.

Nothing of it is seen from outside: the switch is in a namespace of its own, so addresses and
names of bridges are nobody else's.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess

from support.place import system
from tmover.process import identify

_PREFIX = "tmover"
_NEW_NET = 0x40000000
"""CLONE_NEWNET: what kind of namespace `setns` is to enter."""


def cannot_make() -> str:
    """Return why there can be no such machines here, "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        made = subprocess.run(
            ["ip", "netns", "add", name], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "no `ip`: apt-get install iproute2"
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    system("ip", "netns", "del", name)
    return ""


class Machines:
    """So many machines on one switch. Use it as a context manager."""

    def __init__(self, count: int) -> None:
        self._run = f"{_PREFIX}-{os.getpid()}"
        self._switch = f"{self._run}-switch"
        self._count = count
        self.addresses = tuple(f"10.0.0.{k + 1}" for k in range(count))

    def __enter__(self) -> Machines:
        """Set everything up; clear away what killed runs have left."""
        _clear_away()
        system("ip", "netns", "add", self._switch)
        self._ip(self._switch, "link", "add", "br0", "type", "bridge")
        self._ip(self._switch, "link", "set", "br0", "up")
        for k in range(self._count):
            self._boot(k)
        return self

    def __exit__(self, *_: object) -> None:
        """Take everything down."""
        for name in (*map(self._name, range(self._count)), self._switch):
            system("ip", "netns", "del", name)

    def enter(self, k: int) -> None:
        """Have this process, which has one thread, be on machine `k` from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        with pathlib.Path(f"/run/netns/{self._name(k)}").open("rb") as space:
            if libc.setns(space.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self, k: int) -> None:
        """Pull the cable of a machine."""
        self._ip(self._switch, "link", "set", f"port{k}", "down")

    def lose_route(self, k: int, *others: int) -> None:
        """Have all that machine `k` sends to others vanish without a word."""
        for other in others:
            address = f"{self.addresses[other]}/32"
            self._ip(self._name(k), "route", "add", "blackhole", address)

    def slow_down(self, k: int, rate: str) -> None:
        """Let a machine send at most so much, such as `2mbit`."""
        limit = ("rate", rate, "burst", "16kb", "latency", "500ms")
        system("tc", "-n", self._name(k), "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)

    def power_off(self, k: int) -> None:
        """Take a machine away from the others; nothing of it is heard any more."""
        self._ip(self._switch, "link", "del", f"port{k}")

    def boot_again(self, k: int) -> None:
        """Switch a machine on that is off: the same address, and no memory of any connection."""
        system("ip", "netns", "del", self._name(k))
        self._boot(k)

    def _boot(self, k: int) -> None:
        name, address = self._name(k), f"02:00:00:00:00:{k + 1:02x}"
        system("ip", "netns", "add", name)
        end = ("peer", "name", "eth0", "address", address, "netns", name)
        self._ip(self._switch, "link", "add", f"port{k}", "type", "veth", *end)
        self._ip(self._switch, "link", "set", f"port{k}", "master", "br0", "up")
        self._ip(name, "addr", "add", f"{self.addresses[k]}/24", "dev", "eth0")
        self._ip(name, "link", "set", "eth0", "up")
        self._ip(name, "link", "set", "lo", "up")

    def _name(self, k: int) -> str:
        return f"{self._run}-{k}"

    def _ip(self, space: str, *argv: str) -> None:
        system("ip", "-n", space, *argv)


def _clear_away() -> None:
    """Remove the namespaces of runs whose process is gone."""
    for line in system("ip", "netns", "list").splitlines():
        name = line.split()[0] if line else ""
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and identify(int(pid)) is None:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
