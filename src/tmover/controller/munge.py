"""MUNGE, which says whose a process is on any node of a cluster: libmunge, called through ctypes.

A credential is made for whoever calls and can be read once, by one user. Both ask the node's
munged, over its Unix socket; each takes a fraction of a millisecond.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

from tmover.errors import MungeError

LONGEST = 4096
"""Characters of a credential; those made here have a few hundred."""
_LIBRARY = "libmunge.so.2"
_SOCKET, _UID_RESTRICTION = 8, 9  # of enum munge_opt
_SUCCESS = 0


class Decoded(NamedTuple):
    """What a credential says."""

    uid: int
    payload: bytes


def why_not(socket: str = "") -> str:
    """Return why MUNGE cannot be used here, "" if it can: a credential is made and read."""
    try:
        Munge(socket).decode(Munge(socket).encode(b"tmover"))
    except MungeError as error:
        return str(error)
    return ""


class Munge:
    """The munged of this node, at `socket` or where it usually is. Any thread may use it."""

    def __init__(self, socket: str = "") -> None:
        self._socket = socket.encode()

    def encode(self, payload: bytes, *, reader: int | None = None) -> str:
        """Return a credential of this process's user, which only the user `reader` can read.

        Raises `MungeError`.
        """
        library, made = _library(), ctypes.c_void_p()
        with _Context(library, self._socket) as context:
            if reader is not None:
                uid = ctypes.c_uint32(reader)
                context.check(library.munge_ctx_set(context, _UID_RESTRICTION, uid))
            error = library.munge_encode(
                ctypes.byref(made), context, payload, ctypes.c_int(len(payload))
            )
            context.check(error)
            try:
                return ctypes.string_at(made.value or 0).decode("ascii")
            finally:
                _free()(made)

    def decode(self, credential: str) -> Decoded:
        """Return what it says. Raises `MungeError`, also if it was read before or is too old."""
        library, payload = _library(), ctypes.c_void_p()
        length, uid, gid = ctypes.c_int(), ctypes.c_uint32(), ctypes.c_uint32()
        if len(credential) > LONGEST or not credential.isascii() or "\0" in credential:
            msg = "that is no credential"
            raise MungeError(msg)
        with _Context(library, self._socket) as context:
            error = library.munge_decode(
                credential.encode(), context, ctypes.byref(payload), ctypes.byref(length),
                ctypes.byref(uid), ctypes.byref(gid),
            )  # fmt: skip
            try:
                context.check(error)  # of one that is replayed or too old it tells all the same
                said = ctypes.string_at(payload, length.value) if payload.value else b""
            finally:
                _free()(payload)
        return Decoded(uid.value, said)


class _Context:
    """A `munge_ctx_t`."""

    def __init__(self, library: ctypes.CDLL, socket: bytes) -> None:
        self._library = library
        self._socket = socket
        self._as_parameter_ = ctypes.c_void_p(library.munge_ctx_create())

    def check(self, error: int) -> None:
        """Raise what went wrong, if something did."""
        if error == _SUCCESS:
            return
        said = self._library.munge_ctx_strerror(self) or self._library.munge_strerror(error)
        raise MungeError(said.decode(errors="replace").lower())

    def __enter__(self) -> _Context:
        if self._socket:
            self.check(self._library.munge_ctx_set(self, _SOCKET, ctypes.c_char_p(self._socket)))
        return self

    def __exit__(self, *_: object) -> None:
        self._library.munge_ctx_destroy(self)


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        msg = f"{_LIBRARY} is not installed here"
        raise MungeError(msg) from error
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_strerror.restype = ctypes.c_char_p
    library.munge_strerror.restype = ctypes.c_char_p
    return library


@functools.cache
def _free() -> Callable[[ctypes.c_void_p], None]:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return free
