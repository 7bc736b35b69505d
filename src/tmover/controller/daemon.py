"""The controller as a process: start, `controller.json`, signals, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import msgspec

from tmover.config import Config
from tmover.controller import keys
from tmover.controller.audit import Audit
from tmover.controller.client import ADDRESS_FILE, Address, read_address
from tmover.controller.desk import Desk
from tmover.controller.gate import Gate
from tmover.controller.journal import Journal
from tmover.controller.keyring import Keyring
from tmover.controller.reception import Reception
from tmover.controller.shell import Controller
from tmover.errors import ConfigError, ControllerUnavailable, JournalError
from tmover.scheduler.interface import Allocations, Scheduler

logger = logging.getLogger(__name__)

INTERRUPTED = 130


async def serve(
    config: Config,
    state: pathlib.Path,
    scheduler: Scheduler,
    allocations: Allocations | None = None,
    *,
    on_ready: Callable[[Address], None] | None = None,
) -> int:
    """Be the controller that works on `state`, until SIGTERM or SIGINT; return the exit code.

    `on_ready` is told the address once agents can connect. Raises `ConfigError` if another
    controller works on `state` or the address cannot be had, `JournalError` if the journal is
    damaged, `Superseded` if another controller has taken `state` over.
    """
    with contextlib.ExitStack() as stack:
        told = _listen_to_signals(stack)
        journal = _take_journal(config, state)
        stack.callback(journal.close)
        keys.rotate(state)
        server, client = keys.make(state)
        desk = Desk(journal)
        reception = Reception(config.controller, state, server, client.public)
        stack.callback(reception.close)
        gate = _open_gate(config.controller.bind, state, server, client, reception.keyring)
        stack.callback(gate.close)
        reception.open(gate.bound, gate.audit)
        boot = secrets.token_hex(8)
        controller = Controller(
            config,
            state,
            boot=boot,
            desk=desk,
            gate=gate,
            scheduler=scheduler,
            allocations=allocations,
        )
        address = Address(
            address=gate.address, pid=os.getpid(), boot=boot, host=socket.gethostname()
        )
        reception.announce(address)
        stack.callback(_withdraw, state, address)
        keys.write_private(state / ADDRESS_FILE, msgspec.json.encode(address) + b"\n")
        logger.info("listening on %s, state in %s", gate.bound, state)
        if on_ready is not None:
            on_ready(address)
        parts = [
            controller.run(),
            _until_gone(stack, state, config.controller.poll_s),
            _until_superseded(journal, config.controller.claim_s),
        ]
        if reception.door is not None:
            parts.append(reception.door.run())
        number = await _run_until(told, parts)
        logger.info("ended by %s", number.name)
        return INTERRUPTED if number is signal.SIGINT else 0


def run(
    config: Config,
    state: pathlib.Path,
    scheduler: Scheduler,
    allocations: Allocations | None = None,
    *,
    on_ready: Callable[[Address], None] | None = None,
) -> int:
    """Run `serve` in an event loop of its own."""
    return asyncio.run(serve(config, state, scheduler, allocations, on_ready=on_ready))


def _listen_to_signals(stack: contextlib.ExitStack) -> asyncio.Future[signal.Signals]:
    """Return what holds the first signal to end, as soon as one comes."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[signal.Signals] = loop.create_future()

    def tell(number: signal.Signals) -> None:
        if not told.done():
            told.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number)
        stack.callback(loop.remove_signal_handler, number)
    return told


def _take_journal(config: Config, state: pathlib.Path) -> Journal:
    """Return the journals of a state directory, which are this controller's from now on."""
    return Journal(
        keys.private_directory(state) / "journal",
        lines=config.controller.journal_lines,
        size=int(config.controller.journal_mib * 2**20),
        claim_s=config.controller.claim_s,
    )


async def _run_until(
    told: asyncio.Future[signal.Signals], parts: list[Coroutine[Any, Any, None]]
) -> signal.Signals:
    """Run all parts of the controller until it is told to end, or one of them cannot go on."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait([*tasks, told], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # raises: they end only when something broke
        return told.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_superseded(journal: Journal, claim_s: float) -> NoReturn:
    """Renew the claim on the journals; raise `Superseded` once another controller has it."""
    trouble = ""
    while True:
        await asyncio.sleep(claim_s / 5)
        try:
            await asyncio.to_thread(journal.renew)  # a network file system may keep it waiting
            trouble = ""
        except JournalError as error:
            if str(error) != trouble:
                logger.warning("%s; this is tried again", error)
            trouble = str(error)


async def _until_gone(stack: contextlib.ExitStack, state: pathlib.Path, poll_s: float) -> NoReturn:
    """Raise `ConfigError` once `state` is not what it was: nobody would find this controller."""
    held = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # no other has its number
    stack.callback(os.close, held)
    while True:
        if not _is_still(state, held):
            msg = f"the state directory {state} is gone: there is nothing left to look after"
            raise ConfigError(msg)
        await asyncio.sleep(poll_s)


def _is_still(state: pathlib.Path, held: int) -> bool:
    """Return whether the directory that is held open is the one that stands there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.fstat(held), state.stat())
    return False


def _withdraw(state: pathlib.Path, address: Address) -> None:
    """Take our word back on where the controller is, if it is still ours."""
    with contextlib.suppress(ControllerUnavailable, ConfigError):
        if read_address(state) == address:
            (state / ADDRESS_FILE).unlink(missing_ok=True)


def _open_gate(
    bind: str,
    state: pathlib.Path,
    server: keys.Keypair,
    client: keys.Keypair,
    keyring: Keyring,
) -> Gate:
    """Bind. With port 0, to the port of a controller that was killed here, if it is still free."""
    audit = Audit(state)
    if bind.endswith(":0"):
        with contextlib.suppress(ControllerUnavailable, ConfigError):
            before = read_address(state).address
            if before.rpartition(":")[0] == bind.rpartition(":")[0]:
                return Gate(before, server=server, client=client, keyring=keyring, audit=audit)
    return Gate(bind, server=server, client=client, keyring=keyring, audit=audit)
