"""Who may not, what cannot be, one clear line each; and nothing is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket

import psutil
import pytest
import zmq
from click.testing import CliRunner

from support.eventually import eventually
from support.scripted import (
    Cast,
    Controller,
    journaled,
    reachable,
    staged,
    wait_for,
)
from tmover import wire
from tmover.cli.main import tmover
from tmover.controller import keys
from tmover.controller.client import Client, ask, read_address
from tmover.errors import ConfigError, ControllerUnavailable, Refused

# --- who may not ----------------------------------------------------------------------------------


def strangers_keys(directory: pathlib.Path, cast: Cast) -> pathlib.Path:
    """Return a state directory with the controller's address and other keys."""
    keys.make(directory)
    shutil.copy(cast.state / "controller.json", directory / "controller.json")
    return directory


def test_a_controller_that_goes_away_with_a_request_is_not_waited_for(own: Cast) -> None:
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        Client(own.state) as client,
    ):
        client.request(wire.StatusRequest(), 30.0)
        own.controller.signal(signal.SIGSTOP)
        request = pool.submit(client.request, wire.StatusRequest(), 600.0)
        wait_for(request.running, "the request", str)
        own.controller.kill()

        with pytest.raises(ControllerUnavailable, match=r"went away before it answered$"):
            request.result(timeout=30.0)


def test_a_wrong_key_is_refused_with_one_clear_line(cast: Cast, tmp_path: pathlib.Path) -> None:
    state = strangers_keys(tmp_path, cast)
    address = read_address(cast.state).address

    with pytest.raises(ConfigError) as caught:
        ask(state, wire.StatusRequest(), 30.0)
    assert str(caught.value) == (
        f"the controller at {address} is not the one whose key is {state}/keys/server.pub"
    )

    shutil.copy(cast.state / "keys" / "server.pub", state / "keys" / "server.pub")
    with pytest.raises(ConfigError) as caught:
        ask(state, wire.StatusRequest(), 30.0)
    assert str(caught.value) == (
        f"the controller at {address} does not accept the key {state}/keys/client.key"
    )
    assert caught.value.exit_code == 2
    wait_for(lambda: "is not ours" in cast.controller.log.read_text(), "a log line", str)


def test_garbage_and_strangers_change_nothing(cast: Cast, tmp_path: pathlib.Path) -> None:
    job, (first, second) = cast.form(2)
    before = journaled(cast.state, job)
    address = read_address(cast.state).address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    forged = wire.encode(wire.CancelRequest(reason="I am bad"))

    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\xff" * 9 + b"\x7f" * 100):
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            raw.recv(1000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as unauthenticated:
        unauthenticated.linger = 0
        unauthenticated.connect(address)
        unauthenticated.send_multipart(forged)
        assert not unauthenticated.poll(300)
    context.term()
    stranger = strangers_keys(tmp_path, cast)
    shutil.copy(cast.state / "keys" / "server.pub", stranger / "keys" / "server.pub")
    with pytest.raises(ConfigError):
        ask(stranger, wire.CancelRequest(reason="I am bad"))
    first.channel.socket.send_multipart([b"tmover/0", b"x"])
    first.channel.socket.send_multipart([wire.VERSION, b"\xc1"])
    first.channel.socket.send_multipart([wire.VERSION, b"\x81" * 100_000])
    first.channel.socket.send_multipart([b""] * 50)

    cast.until(lambda: len(first.refusals) == 4, "refusals")
    assert cast.status(job).phase == "training"
    assert journaled(cast.state, job) == before
    second.finish()
    first.finish()
    cast.until(lambda: second.stopped is not None, "the job to end as ever")


# --- one clear line each --------------------------------------------------------------------------


def test_a_port_in_use_is_one_clear_line(cast: Cast, tmp_path: pathlib.Path) -> None:
    address = read_address(cast.state).address

    done = Controller(tmp_path / "other").run_to_end("--bind", address)

    assert done.returncode == 2
    assert done.stderr == (
        f"error: cannot listen on {address}: address already in use; "
        "choose another with --bind, or port 0 for a free one\n"
    )
    assert not (tmp_path / "other" / "controller.json").exists()


def test_an_address_that_is_none_is_one_clear_line(tmp_path: pathlib.Path) -> None:
    done = Controller(tmp_path / "other").run_to_end("--bind", "over there")

    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot listen on 'over there': write tcp://ADDRESS:PORT")


def test_a_second_controller_on_the_same_state_is_one_clear_line(cast: Cast) -> None:
    assert cast.controller.process is not None

    done = Controller(cast.state).run_to_end()

    assert done.returncode == 2
    assert done.stderr == (
        f"error: another controller (process {cast.controller.process.pid} on "
        f"{socket.gethostname()}) works on "
        f"{cast.state}/journal: stop it, or choose another state directory\n"
    )
    assert reachable(cast.state)


def test_a_damaged_journal_is_one_clear_line(tmp_path: pathlib.Path) -> None:
    with staged(tmp_path) as cast:
        job = cast.submit(2)
        cast.controller.stop()
    path = cast.state / "journal" / f"{job}.jsonl"
    path.write_bytes(path.read_bytes().replace(b"ann", b"eve"))

    done = Controller(cast.state).run_to_end()

    assert done.returncode == 1
    assert done.stderr == (
        f"error: {path}, line 1 is damaged: its sum does not fit its content. Put a good copy of "
        f"the file in its place, or give job {job} up (its ranks train on, unprotected): "
        f"mv {path} {path}.damaged\n"
    )


def test_no_controller_is_one_clear_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ControllerUnavailable) as caught:
        ask(tmp_path, wire.StatusRequest())

    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        f"no controller runs on {tmp_path}: start one with `tmover controller --state {tmp_path}`"
    )


def test_a_controller_that_was_killed_is_one_clear_line(own: Cast) -> None:
    address = read_address(own.state).address
    own.controller.kill()

    with pytest.raises(ControllerUnavailable) as caught:
        ask(own.state, wire.StatusRequest(), 0.3)

    assert str(caught.value) == f"no controller answers at {address}: nobody listens there"


def test_somebody_else_at_the_address_is_one_clear_line(own: Cast) -> None:
    address = read_address(own.state).address
    own.controller.kill()

    with (
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
        pytest.raises(ControllerUnavailable) as caught,
    ):
        ask(own.state, wire.StatusRequest(), 0.5)

    assert str(caught.value).endswith("somebody listens there, but does not speak")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "controller.json is damaged: Input data was truncated"),
        ('{"address": 1}', "controller.json is damaged: Expected `str`, got `int`"),
        ('{"address": "over there", "pid": 1, "boot": "x"}', "cannot connect to over there"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_clear_line(
    tmp_path: pathlib.Path, text: str, complaint: str
) -> None:
    keys.make(tmp_path)
    (tmp_path / "controller.json").write_text(text)

    with pytest.raises(ConfigError, match=re.escape(complaint)):
        ask(tmp_path, wire.StatusRequest(), 1.0)


# --- nothing is left ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bind", "complaint"),
    [
        ("tcp://127.0.0.1:99999", "write tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5599"),
        ("tcp://127.0.0.1", "write tcp://ADDRESS:PORT"),
        ("foo", "cannot listen on 'foo': write tcp://ADDRESS:PORT"),
        ("tcp://192.0.2.1:0", "choose an address of this machine with --bind, such as tcp://"),
    ],
)
def test_an_address_that_cannot_be_had_says_what_to_do(
    tmp_path: pathlib.Path, bind: str, complaint: str
) -> None:
    done = CliRunner().invoke(tmover, ["controller", "--state", str(tmp_path), "--bind", bind])

    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert complaint in done.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_controller_that_is_told_to_end_leaves_nothing(
    tmp_path: pathlib.Path, number: signal.Signals, code: int
) -> None:
    with staged(tmp_path) as cast:
        cast.form(2)
        address = read_address(cast.state).address

        assert cast.controller.stop(number) == code

    assert not (cast.state / "controller.json").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    names = {p.name for p in cast.state.rglob("*") if p.is_file()} - {"lock", "id", "claim.last"}
    assert names == {"server.key", "server.pub", "client.key", "1", "1.jsonl"}


def test_a_client_leaves_no_thread_and_no_socket(cast: Cast, tmp_path: pathlib.Path) -> None:
    stranger = strangers_keys(tmp_path, cast)
    me = psutil.Process()
    before = (me.num_threads(), me.num_fds())

    for _ in range(3):
        ask(cast.state, wire.StatusRequest())
        with pytest.raises(ConfigError):
            ask(stranger, wire.StatusRequest())
        with pytest.raises(Refused), Client(cast.state) as client:
            client.request(wire.StatusRequest(job="9999"))

    eventually(lambda: (me.num_threads(), me.num_fds()) == before)
