"""How a controller knows its users: by keys that it lays down for them, or by MUNGE at a door."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib

import msgspec

from tmover.config import ControllerConfig
from tmover.controller import keys, munge
from tmover.controller.audit import Audit
from tmover.controller.client import ADDRESS_FILE, Address
from tmover.controller.door import Door, Porter
from tmover.controller.gate import reachable
from tmover.controller.introduction import DOOR_FILE, Entrance
from tmover.controller.keyring import Keyring
from tmover.controller.users import Users, open_to_all
from tmover.core.authority import ROOT
from tmover.errors import ConfigError
from tmover.owner import PLACES

logger = logging.getLogger(__name__)

_MAX_PORT = 65535


class Reception:
    """The users of one controller, from when it starts until it ends."""

    def __init__(
        self, table: ControllerConfig, state: pathlib.Path, server: keys.Keypair, client: bytes
    ) -> None:
        """Make what users need. Raises `ConfigError`, also if MUNGE is asked for and not there."""
        self._table = table
        self._state = state
        self._server = server
        self.by_munge, why_not = _is_by_munge(table, state)
        self._files = Users(state, () if self.by_munge else table.users, server)
        if why_not:
            logger.info("users are known by files, for MUNGE does not answer: %s", why_not)
        introduced = state / "keys" / keys.INTRODUCED if self.by_munge else None
        self.keyring = Keyring({client: "", **self._files.keys}, introduced, serves=self._serves)
        self.door: Door | None = None
        self._announced = b""

    def open(self, gate: str, audit: Audit) -> None:
        """Open the door beside the gate that is bound to an address, if there is to be one."""
        if not self.by_munge:
            return
        for directory in (self._state, self._state / PLACES):
            open_to_all(directory)
        porter = Porter(
            server=self._server.public,
            munge=munge.Munge(self._table.munge_socket),
            keyring=self.keyring,
        )
        bind = self._table.door or _after(gate, self._table.bind)
        self.door = Door(bind, server=self._server, porter=porter, audit=audit)

    def announce(self, address: Address) -> None:
        """Tell users where the controller is, each way that it may be known to them."""
        self._announced = msgspec.json.encode(address) + b"\n"
        self._files.announce(ADDRESS_FILE, self._announced)
        path = self._state / PLACES / DOOR_FILE
        if self.door is None:
            with contextlib.suppress(OSError):
                path.unlink()
            return
        entrance = Entrance(
            address=address.address,
            door=reachable(self.door.bound),
            server=self._server.public.decode(),
            boot=address.boot,
            pid=address.pid,
            host=address.host,
            munge=self._table.munge_socket,
        )
        keys.write_private(path, msgspec.json.encode(entrance) + b"\n", mode=0o644)

    def close(self) -> None:
        """Close the door, and take back what was announced by files.

        What stands at the door stays: those who look for it wait for the next controller.
        """
        self._files.withdraw(ADDRESS_FILE, self._announced)
        if self.door is not None:
            self.door.close()

    def _serves(self, user: str) -> bool:
        table = self._table
        return not table.users or user == ROOT or user in (*table.users, *table.operators)


def _is_by_munge(table: ControllerConfig, state: pathlib.Path) -> tuple[bool, str]:
    """Return whether MUNGE says who users are, and why it does not where it could.

    Raises `ConfigError` if it should and cannot.
    """
    if table.identity == "files" or os.geteuid() != 0:
        return False, ""
    is_cluster_s = bool(table.users) or (table.state and pathlib.Path(table.state) == state)
    if table.identity == "auto" and not is_cluster_s:
        return False, ""
    why_not = munge.why_not(table.munge_socket)
    if why_not and table.identity == "munge":
        msg = f"MUNGE does not say who users are (identity in [controller]): {why_not}"
        raise ConfigError(msg)
    return not why_not, why_not


def _after(gate: str, bind: str) -> str:
    """Return the address of the door: the port after the gate's, or a free one like the gate's.

    >>> _after("tcp://10.0.0.1:5599", "tcp://10.0.0.1:5599"), _after("tcp://[::]:41", "tcp://[::]:0")
    ('tcp://10.0.0.1:5600', 'tcp://[::]:0')
    """
    host, _, port = gate.rpartition(":")
    is_free_one = bind.endswith(":0") or int(port) >= _MAX_PORT
    return f"{host}:{0 if is_free_one else int(port) + 1}"
