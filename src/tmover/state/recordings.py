"""The store of recordings: one directory a job, tensors by their contents, and an index per rank.

    JOB/rank-0.recording    a seal, then what `core.recorded.Recording` says
    JOB/tensors/DIGEST      the bytes of a tensor, named by their SHA-256: equal ones are there once

Each file is there as a whole or not at all, and the index comes last. Nothing is unpickled, and
what is read must be its owner's alone, and be what its name says.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Mapping

import msgspec
import torch

from tmover.core.recorded import FORMAT, Answer, Heard, Key, Part, Recording, Tape, biggest
from tmover.errors import StateError
from tmover.memory import view

JOBS_KEPT = 8
"""Recordings of so many jobs are kept, the newest; a job that needs more has its own directory."""
_SUFFIX = ".recording"
_TENSORS = "tensors"
_INDEX_LIMIT = 64 << 20
_SEAL = 32
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


# --- writing --------------------------------------------------------------------------------------


def save(place: pathlib.Path, recording: Recording, tape: Tape, *, limit: int) -> Recording:
    """Write what a rank has recorded, in at most `limit` bytes; return the index that was written.

    What does not fit is left out, the biggest tensors first. Raises `OSError` and `StateError`.
    """
    _make_own(place)
    _make_own(place / _TENSORS)
    digests: dict[str, torch.Tensor] = {}
    answers = tuple(_answer(key, heard, digests) for key, heard in sorted(tape.items()))
    out = biggest({name: len(view(tensor)) for name, tensor in digests.items()}, limit)
    for digest, tensor in digests.items():
        path = place / _TENSORS / digest
        if digest not in out and not path.exists():
            _write(path, view(tensor))
    written = msgspec.structs.replace(
        recording, answers=tuple(_without(answer, out) for answer in answers)
    )
    before = _named(place)
    body = msgspec.msgpack.encode(written)
    _write(_index(place, recording.rank), hashlib.sha256(body).digest() + body)
    for digest in before - _named(place):  # of what this rank has recorded in an earlier start
        (place / _TENSORS / digest).unlink(missing_ok=True)
    return written


def _named(place: pathlib.Path) -> set[str]:
    """Return the tensors that any index names which can be read."""
    found: set[str] = set()
    for path in place.glob(f"rank-*{_SUFFIX}"):
        with contextlib.suppress(StateError):
            parts = (part for answer in _read_index(path).answers for part in answer.parts)
            found |= {part.digest for part in parts if _is_digest(part.digest)}
    return found


def _answer(key: Key, heard: Heard, digests: dict[str, torch.Tensor]) -> Answer:
    parts = []
    for out in heard.outs:
        if out is None:
            parts.append(Part("", (), ""))
            continue
        digest = hashlib.sha256(view(out)).hexdigest()
        digests.setdefault(digest, out)
        parts.append(Part(str(out.dtype).removeprefix("torch."), tuple(out.shape), digest))
    return Answer(*key, heard.op, tuple(parts))


def _without(answer: Answer, out: frozenset[str]) -> Answer:
    if not any(part.digest in out for part in answer.parts):
        return answer
    parts = tuple(
        msgspec.structs.replace(part, digest="") if part.digest in out else part
        for part in answer.parts
    )
    return msgspec.structs.replace(answer, parts=parts)


def _make_own(place: pathlib.Path) -> None:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(place)


def _write(path: pathlib.Path, data: bytes | memoryview) -> None:
    whole = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        whole.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            whole.unlink()
        raise


def prune(root: pathlib.Path, keep: pathlib.Path) -> None:
    """Remove the recordings of all but the newest jobs. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        jobs = [job for job in root.iterdir() if job != keep and (job / _TENSORS).is_dir()]
        newest = sorted(jobs, key=lambda job: job.stat().st_mtime, reverse=True)
        for job in newest[JOBS_KEPT - 1 :]:
            shutil.rmtree(job, ignore_errors=True)


# --- reading --------------------------------------------------------------------------------------


def find(place: pathlib.Path, rank: int) -> Recording | None:
    """Return the recording for a rank: its own, or that of its role; None if there is none.

    Raises `StateError` if what may be it cannot be trusted or read.
    """
    if not place.is_dir():
        return None
    _require_own(place)
    own = _index(place, rank)
    others = sorted(path for path in place.glob(f"rank-*{_SUFFIX}") if path != own)
    for path in [own, *others] if own.exists() else others:
        recording = _read_index(path)
        if rank in recording.ranks:
            return recording
    return None


def read(place: pathlib.Path, recording: Recording) -> Tape:
    """Return what a recording holds. Raises `StateError` if a tensor of it is not what it was."""
    memory: dict[str, bytearray] = {}
    for part in (part for answer in recording.answers for part in answer.parts):
        if part.digest and part.digest not in memory:
            memory[part.digest] = _read_tensor(place, part.digest)
    return {answer.key: _heard(answer, memory) for answer in recording.answers}


def _heard(answer: Answer, memory: Mapping[str, bytearray]) -> Heard:
    return Heard(answer.op, tuple(_tensor(part, memory) for part in answer.parts))


def _tensor(part: Part, memory: Mapping[str, bytearray]) -> torch.Tensor | None:
    if not part.digest:
        return None
    dtype, data = _DTYPES.get(part.dtype), memory[part.digest]
    try:
        if dtype is None:
            msg = f"a tensor of {part.dtype}"
            raise ValueError(msg)
        if not data:
            return torch.empty(part.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(part.shape)
    except (ValueError, RuntimeError) as error:
        msg = f"a recorded tensor is not what its index says: {error}"
        raise StateError(msg) from error


def _read_tensor(place: pathlib.Path, digest: str) -> bytearray:
    if not _is_digest(digest):
        msg = f"a recording names a tensor {digest!r}"
        raise StateError(msg)
    path = place / _TENSORS / digest
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != digest:
        msg = f"{path} is damaged: it is not what its name says; remove {place}"
        raise StateError(msg)
    return data


def _is_digest(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _read_index(path: pathlib.Path) -> Recording:
    data = _read(path, limit=_INDEX_LIMIT)
    seal, body = bytes(data[:_SEAL]), bytes(data[_SEAL:])
    if hashlib.sha256(body).digest() != seal:
        msg = f"{path} is damaged: what it holds is not what was written; remove it"
        raise StateError(msg)
    try:
        recording = msgspec.msgpack.decode(body, type=Recording)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        msg = f"{path} is no recording of this version: {error}"
        raise StateError(msg) from error
    if recording.format != FORMAT:
        msg = f"{path} is a recording of format {recording.format}, this version reads {FORMAT}"
        raise StateError(msg)
    return recording


def _read(path: pathlib.Path, limit: int | None = None) -> bytearray:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                msg = f"{path} is no file of this user's"
                raise StateError(msg)
            if limit is not None and status.st_size > limit:
                msg = f"{path} has {status.st_size} bytes, more than the {limit} that it may have"
                raise StateError(msg)
            return bytearray(file.read())
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror or error}"
        raise StateError(msg) from error


def _require_own(place: pathlib.Path) -> None:
    """Raise `StateError` unless the directory is this user's, and nobody else can write to it."""
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        msg = f"{place} is no directory of this user's: recordings are neither read nor written"
        raise StateError(msg)
    if status.st_mode & 0o077:
        msg = f"{place} is open to others: recordings are neither read nor written; chmod it to 700"
        raise StateError(msg)


def _index(place: pathlib.Path, rank: int) -> pathlib.Path:
    return place / f"rank-{rank}{_SUFFIX}"
