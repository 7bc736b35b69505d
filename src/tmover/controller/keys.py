"""Keys and secrets in the state directory: who may speak to the controller, and to a job's ranks.

    DIR/keys/server.key   public and secret half of the controller's CURVE key
    DIR/keys/server.pub   its public half, for those who connect
    DIR/keys/client.key   public and secret half of the key that agents and commands use
    DIR/secrets/<job>     what the job's ranks prove to each other that they know

    DIR/keys/rotate       asks for new keys of all, which the next controller makes

All are made when first needed, with mode 0600 in directories of mode 0700; whoever can read them
may act. A directory that was there before keeps its mode, and is refused if others can write to it.
A secret never stands in the journal, in an argument list or in a log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import secrets
import string
import tempfile
from typing import NamedTuple

import zmq

from tmover.errors import ConfigError
from tmover.owner import PLACES

logger = logging.getLogger(__name__)

KEY_LENGTH = 40
"""A CURVE key in ZeroMQ's Z85 alphabet."""
SECRET_BYTES = 32
INTRODUCED = "introduced.jsonl"
"""The keys of users whom MUNGE vouches for."""
_ROTATE = "rotate"
_Z85 = frozenset(string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#")


class Keypair(NamedTuple):
    """Both halves of a CURVE key."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        """Return the public half only, fit for a log."""
        return f"Keypair(public={self.public!r}, secret=...)"


class ClientKeys(NamedTuple):
    """What somebody needs who wants to speak to the controller."""

    server: bytes
    """The public half of the controller's key."""
    own: Keypair


def make(state: pathlib.Path) -> tuple[Keypair, Keypair]:
    """Return the server's and the client's keys, made now if they are missing.

    Raises `ConfigError` if a key cannot be read.
    """
    directory = private_directory(state / "keys")
    server = read_or_make(directory / "server.key")
    client = read_or_make(directory / "client.key")
    if _bytes_of(directory / "server.pub") != server.public + b"\n":
        write_private(directory / "server.pub", server.public + b"\n")
    return server, client


def ask_to_rotate(state: pathlib.Path) -> None:
    """Have the next controller of `state` make new keys: one that runs must not lose its own."""
    write_private(private_directory(state / "keys") / _ROTATE, b"")


def rotate(state: pathlib.Path) -> None:
    """Remove all keys if that was asked for, the wish last: a crash has it done again.

    For a controller that starts, which holds the state directory's lock. Raises `ConfigError`.
    """
    directory = state / "keys"
    if not (directory / _ROTATE).exists():
        return
    own = ("server.key", "client.key", INTRODUCED)
    theirs = (state / PLACES).glob("*/keys/client.key")
    try:
        for path in (*(directory / name for name in own), *theirs, directory / _ROTATE):
            path.unlink(missing_ok=True)
    except OSError as error:
        msg = f"cannot remove the old key {error.filename}: {error.strerror}"
        raise ConfigError(msg) from error
    logger.info("all keys in %s are made anew, as was asked for", directory)


def read_client(state: pathlib.Path) -> ClientKeys:
    """Return what is needed to speak to the controller of `state`. Raises `ConfigError`."""
    directory = state / "keys"
    own = _read_pair(directory / "client.key")
    (server,) = _read_lines(directory / "server.pub", 1)
    return ClientKeys(server=server, own=own)


def make_secret(state: pathlib.Path, job: str) -> None:
    """Make the secret of a new job."""
    write_private(private_directory(state / "secrets") / job, secrets.token_bytes(SECRET_BYTES))


def read_secret(state: pathlib.Path, job: str) -> bytes:
    """Return the job's secret. Raises `ConfigError` if it is gone or damaged."""
    path = state / "secrets" / job
    secret = _read_private(path)
    if len(secret) != SECRET_BYTES:
        msg = f"{path} holds {len(secret)} bytes, not the {SECRET_BYTES} of a job's secret"
        raise ConfigError(msg)
    return secret


def private_directory(path: pathlib.Path) -> pathlib.Path:
    """Return the directory, made so that only its owner can look into it if it is not there.

    The mode of one that is there is its owner's business: it may be /tmp. Raises `ConfigError` if
    others can write there, since they could put keys of their own in the place of ours.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
    except OSError as error:
        msg = f"cannot use the directory {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error
    if mode & 0o022:
        msg = (
            f"others can write to the directory {path}: choose one of your own with --state, "
            f"or, if it is, `chmod go-w {path}`"
        )
        raise ConfigError(msg)
    return path


def write_private(
    path: pathlib.Path,
    data: bytes,
    *,
    uid: int | None = None,
    mode: int = 0o600,
    afresh: bool = False,
) -> None:
    """Write a file that only its owner (`uid`) can read, whole or not at all.

    With another `mode`, that others can read. `afresh`: if somebody else has written it meanwhile,
    that stays.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # mode 0600
            beside = pathlib.Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                if uid is not None:
                    os.fchown(file.fileno(), uid, -1)
                os.fsync(file.fileno())
                if afresh:
                    _link(beside, path)
                else:
                    beside.replace(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}"
        raise ConfigError(msg) from error


def _link(beside: pathlib.Path, path: pathlib.Path) -> None:
    """Give a file its name unless another has it, as far as the file system can tell."""
    try:
        path.hardlink_to(beside)
    except FileExistsError:
        pass
    except OSError:  # not every file system has links
        beside.replace(path)
        return
    beside.unlink()


def read_or_make(path: pathlib.Path, *, uid: int | None = None) -> Keypair:
    """Return the key pair in `path`, made now if it is missing; the file is made `uid`'s."""
    try:
        is_there = path.exists()
    except OSError as error:
        msg = f"cannot look for the key file {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error
    if not is_there:
        public, secret = zmq.curve_keypair()
        write_private(path, public + b"\n" + secret + b"\n", uid=uid, afresh=True)
    return _read_pair(path)


def _read_pair(path: pathlib.Path) -> Keypair:
    public, secret = _read_lines(path, 2)
    try:
        belongs = zmq.curve_public(secret) == public
    except zmq.ZMQError:
        belongs = False
    if not belongs:
        msg = f"{path} is damaged: its halves do not belong together"
        raise ConfigError(msg)
    return Keypair(public, secret)


def _read_lines(path: pathlib.Path, count: int) -> list[bytes]:
    lines = _read_private(path).split()
    if len(lines) != count or any(
        len(x) != KEY_LENGTH or not _Z85.issuperset(x.decode(errors="replace")) for x in lines
    ):
        msg = f"{path} is damaged: it does not hold {count} CURVE key(s), one a line"
        raise ConfigError(msg)
    return lines


def _read_private(path: pathlib.Path) -> bytes:
    """Return what the file holds, if nobody else can read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read()
    except OSError as error:
        msg = f"cannot read the key file {path}: {error.strerror}"
        raise ConfigError(msg) from error
    if mode & 0o077:
        msg = f"{path} can be read by others: `chmod 600 {path}`, or make new keys"
        raise ConfigError(msg)
    return data


def _bytes_of(path: pathlib.Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None
