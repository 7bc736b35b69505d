"""Whether a controller runs here, as far as the state directory tells."""

from __future__ import annotations

import os
import pathlib
import socket

import msgspec
import pytest

from tmover.controller.client import ADDRESS_FILE, Address
from tmover.controller.starter import Starter


@pytest.mark.parametrize(("host", "runs"), [(socket.gethostname(), True), ("another", False)])
def test_the_pid_of_a_controller_means_a_process_of_its_own_machine(
    tmp_path: pathlib.Path, host: str, *, runs: bool
) -> None:
    said = Address(address="tcp://127.0.0.1:1", pid=os.getpid(), boot="b", host=host)
    (tmp_path / ADDRESS_FILE).write_bytes(msgspec.json.encode(said))

    assert (Starter(tmp_path).running() is not None) is runs
