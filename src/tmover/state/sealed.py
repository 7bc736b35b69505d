"""Files that tell whether they are what was written: each begins with a hash of the rest.

One of them, `sums`, has the hashes of all others in a rank's part of a checkpoint. It is written
last: once it is there, the part is.
"""

from __future__ import annotations

import pathlib
from typing import Any, TypeVar

import msgspec
import xxhash

from tmover.errors import StateError
from tmover.state import shelf

_DIGEST_BYTES = 16
_READ_BYTES = 1 << 20
_Kind = TypeVar("_Kind")


def write(path: pathlib.Path, value: Any) -> None:
    """Have a file with this value on the disk, or none of that name."""
    data = msgspec.msgpack.encode(value)
    shelf.write(path, xxhash.xxh3_128_digest(data) + data)


def read(path: pathlib.Path, kind: type[_Kind]) -> _Kind:
    """Return the value in a file. Raises `StateError` if it is not as it was written."""
    try:
        data = path.read_bytes()
        if xxhash.xxh3_128_digest(data[_DIGEST_BYTES:]) == data[:_DIGEST_BYTES]:
            return msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=kind)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error
    msg = f"{path} is damaged"
    raise StateError(msg)


def sum_up(part: pathlib.Path) -> None:
    """Write the hashes of all files of a part, which are on the disk: it is complete then."""
    write(part / shelf.SUMS, {name: sum_of(part / name) for name in shelf.listed(part)})


def check(part: pathlib.Path) -> None:
    """Read all files of a part. Raises `StateError` naming one that is not as it was written."""
    for name, digest in read(part / shelf.SUMS, dict[str, bytes]).items():
        if sum_of(part / name) != digest:
            msg = f"{part / name} is damaged"
            raise StateError(msg)


def sum_of(path: pathlib.Path) -> bytes:
    """Return the hash of a file's content. Raises `StateError` if it cannot be read."""
    total, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total.update(buffer[:count])
        return total.digest()
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error
