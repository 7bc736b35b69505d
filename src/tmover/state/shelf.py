"""A directory of checkpoints: which are complete, and how one becomes complete, at once.

A checkpoint is written into `step-N.TAG.partial`, by each rank its part. When all parts are there,
one rank adds what describes the whole and gives the directory its name, `step-N`. So there is the
whole or nothing under such a name, whoever dies when. One that is no longer wanted is given another
name first, and then removed.

Nothing here knows what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shutil
from typing import NamedTuple

import msgspec
import xxhash

from tmover.errors import StateError

FORMAT = 1
MANIFEST = "manifest.json"
SUMS = "sums"
"""What appears in a part once all of it is on the disk."""
FAILED = "failed"
_SPARE = "spare"
"""An empty file, made when an attempt begins, that `FAILED` is made of: that takes no inode."""
_COMPLETE = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-(\d+)\..*(partial|removed)")
_SIGN = ".shared"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a complete checkpoint says of itself."""

    step: int
    """The last step that is in it."""
    job: str
    """A mark of the job that made it, which no other job has."""
    replicas: tuple[int, ...]
    """By rank, the first rank that held the same parameters and optimizer state."""
    any_ranks: bool
    """Whether it can be taken apart for another number of ranks."""
    metadata: str
    """A hash of what says where each tensor is."""
    files: dict[str, int]
    """All others in the directory, and their sizes in bytes."""
    format: int = FORMAT
    seal: str = ""
    """A hash of all this."""

    @property
    def ranks(self) -> int:
        """The number of ranks that made it."""
        return len(self.replicas)


class Stored(NamedTuple):
    """A complete checkpoint."""

    path: pathlib.Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return self.manifest.step


def partial(directory: pathlib.Path, step: int, tag: str) -> pathlib.Path:
    """Return where the checkpoint of a step is written. Each attempt at it has a tag of its own."""
    return directory / f"step-{step}.{tag}.partial"


def part(whole: pathlib.Path, rank: int) -> pathlib.Path:
    """Return a rank's part of a checkpoint."""
    return whole / f"rank-{rank:05}"


def begin(unfinished: pathlib.Path) -> None:
    """Have what an attempt needs beside its parts."""
    unfinished.mkdir(parents=True, exist_ok=True)
    (unfinished / _SPARE).touch()


def publish(unfinished: pathlib.Path, manifest: Manifest) -> pathlib.Path:
    """Make a checkpoint whose parts are all on the disk complete; return where it is then.

    If there is one of its step already, it is that one that stays.
    """
    sealed = msgspec.structs.replace(manifest, seal=_seal(manifest))
    write(unfinished / MANIFEST, msgspec.json.format(msgspec.json.encode(sealed), indent=1))
    (unfinished / _SPARE).unlink(missing_ok=True)
    final = unfinished.with_name(f"step-{manifest.step}")
    if has(final.parent, manifest.step):
        shutil.rmtree(unfinished, ignore_errors=True)
        return final
    unfinished.rename(final)
    sync(final.parent)
    return final


def _seal(manifest: Manifest) -> str:
    bare = msgspec.structs.replace(manifest, seal="")
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))


def listed(whole: pathlib.Path) -> dict[str, int]:
    """Return all files of a checkpoint, or of a part, and their sizes."""
    found = (p for p in whole.rglob("*") if p.is_file() and p != whole / _SPARE)
    return {path.relative_to(whole).as_posix(): path.stat().st_size for path in sorted(found)}


def read(path: pathlib.Path) -> Stored:
    """Return a complete checkpoint. Raises `StateError` saying what is wrong with it."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} is no complete checkpoint: its {MANIFEST} cannot be read: {error}"
        raise StateError(msg) from error
    if manifest.format != FORMAT:
        msg = f"{path} has format {manifest.format}, and this tmover reads {FORMAT}"
        raise StateError(msg)
    if manifest.seal != _seal(manifest):
        msg = f"{path} is damaged: its {MANIFEST} was altered"
        raise StateError(msg)
    if path.name != f"step-{manifest.step}":
        msg = f"{path} is damaged: its {MANIFEST} is of step {manifest.step}"
        raise StateError(msg)
    for name, size in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            found = -1
        if found != size:
            state = "missing" if found < 0 else f"{found} bytes long"
            msg = f"{path} is damaged: {name}, of {size} bytes, is {state}"
            raise StateError(msg)
    return Stored(path, manifest)


def complete(directory: pathlib.Path) -> list[pathlib.Path]:
    """Return the complete checkpoints, the newest first."""
    if not directory.is_dir():
        return []
    steps = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := _COMPLETE.fullmatch(path.name))
    }
    return [steps[step] for step in sorted(steps, reverse=True)]


def set_aside(path: pathlib.Path) -> None:
    """Give a checkpoint that cannot be read a name that tells so, if that can be done."""
    names = (f"{path.name}.damaged", *(f"{path.name}.damaged-{n}" for n in range(2, 100)))
    free = (path.with_name(name) for name in names if not path.with_name(name).exists())
    with contextlib.suppress(OSError, StopIteration):
        path.rename(next(free))


def has(directory: pathlib.Path, step: int) -> bool:
    """Return whether there is a complete checkpoint of a step."""
    return (directory / f"step-{step}" / MANIFEST).exists()


def prune(directory: pathlib.Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest."""
    for path in complete(directory)[keep:]:
        doomed = path.with_name(f"{path.name}.removed")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(directory: pathlib.Path, until: int | None = None) -> None:
    """Remove what was left unfinished, or only that of steps up to one."""
    for path in directory.iterdir():
        match = _UNFINISHED.fullmatch(path.name)
        if match and (until is None or int(match[1]) <= until):
            shutil.rmtree(path, ignore_errors=True)


def give_up(unfinished: pathlib.Path) -> None:
    """Say, if that can be written, that a part of an attempt will not come."""
    failed = unfinished / FAILED
    with contextlib.suppress(OSError):
        (unfinished / _SPARE).rename(failed)
    with contextlib.suppress(OSError):
        failed.touch()


def is_given_up(unfinished: pathlib.Path) -> bool:
    """Return whether a part of an attempt will not come."""
    return (unfinished / FAILED).exists()


def clear(unfinished: pathlib.Path, rank: int | None = None) -> None:
    """Remove a rank's part of an attempt that was given up, or all parts that nobody writes."""
    with contextlib.suppress(OSError):  # what cannot be looked at stays for `sweep`
        parts = unfinished.glob("rank-*") if rank is None else [part(unfinished, rank)]
        for path in parts:
            if rank is not None or (path / SUMS).exists():
                shutil.rmtree(path, ignore_errors=True)


def sign(directory: pathlib.Path) -> str:
    """Write something into a directory by which it is known; return that."""
    mark = secrets.token_hex(8)
    write(directory / _SIGN, mark.encode())
    return mark


def signed(directory: pathlib.Path) -> str:
    """Return what a directory is known by, nothing if it is not."""
    try:
        return (directory / _SIGN).read_text()
    except OSError:
        return ""


def write(path: pathlib.Path, data: bytes) -> None:
    """Have a file with this content on the disk, or none of that name."""
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def sync(directory: pathlib.Path) -> None:
    """Have what a directory lists on the disk, where the file system can say so."""
    number = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)
