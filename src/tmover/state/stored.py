"""One rank's part of a checkpoint, written and read; and what makes parts a whole.

Tensors are written as `torch.distributed.checkpoint` does (see `distcp`), those that several ranks
hold alike by one of them. The rest of what a rank tracks, and what it alone holds, is in a file of
its own, `private`; `outline` tells how its part compares with others', `sums` what all of it hashes
to.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
import xxhash

from tmover.errors import StateError
from tmover.state import distcp, memory, pieces, rng, sealed, shelf
from tmover.state.capture import Header, Tracked
from tmover.state.distcp import Block
from tmover.state.generations import Copying, Generation
from tmover.state.landing import Landing
from tmover.state.parts import ExtraPart
from tmover.state.pieces import Piece
from tmover.state.position import Position
from tmover.state.records import Record

_headers = msgspec.msgpack.Decoder(Header)


class Private(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank writes beside its tensors."""

    header: bytes
    keys: tuple[str, ...]
    """What its tensors are called, by number."""
    record: bytes
    seat: dict[str, str]


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared between ranks before their parts are a whole."""

    sizes: dict[str, tuple[int, ...]]
    """Of all tensors, whole, by name."""
    plain: dict[str, bytes]
    """Hashes of what is not split, by name; but of buffers that differ by rank."""


class Staged:
    """What a rank held after a step, on its way to the disk. Made beside the training."""

    def __init__(
        self,
        tracked: Tracked,
        *,
        step: int,
        record: bytes,
        rank: int,
        replicas: Sequence[int],
        kept: Generation | None = None,
    ) -> None:
        """Begin to copy, unless there is a copy that was `kept`, maybe of another rank.

        Then the meshes say what that rank's parts are. `replicas`: by rank, the first that holds
        the same.
        """
        self.step = step
        self._copying: Copying | None = None
        if kept is None:
            self._copying = Copying(tracked, step=step, record=record)
            kept = self._copying.generation
        self._generation = generation = kept
        header, self._numbers = pieces.kept(tracked, _headers.decode(generation.header))
        self._header = msgspec.msgpack.encode(header)
        self._pieces = pieces.described(tracked, header.parts)
        self._seat = generation.seat
        varying = tracked.buffers.varying().items()
        self._varying = {f"{name}.{key}" for name, inner in varying for key in inner}
        self._members = [r for r, first in enumerate(replicas) if first == replicas[rank]]
        self._rank = rank
        self._is_alone = len(set(replicas)) == 1

    def finish(self) -> None:
        """Copy what is left to copy: what was copied may change then."""
        if self._copying is not None:
            self._copying.finish()

    def write(self, directory: pathlib.Path) -> None:
        """Write this rank's part, all of it or nothing that counts."""
        self.finish()
        generation = self._generation
        tensors = [generation.tensors[number] for number in self._numbers]
        blocks = [_block(p, p.key, t) for p, t in zip(self._pieces, tensors, strict=True)]
        directory.mkdir(parents=True, exist_ok=True)
        private = Private(
            header=self._header,
            keys=tuple(piece.key for piece in self._pieces),
            record=generation.record,
            seat=self._seat,
        )
        sealed.write(directory / "private", private)
        sealed.write(directory / "outline", self._outline(blocks))
        mine = [
            block
            for block, piece in zip(blocks, self._pieces, strict=True)
            if piece.writer(self._members) == self._rank
        ]
        distcp.write(directory, mine)
        shelf.sync(directory.parent)
        sealed.sum_up(directory)

    def _outline(self, blocks: list[Block]) -> Outline:
        sizes = {block.key: block.size for block in blocks}
        plain: dict[str, bytes] = {}
        for piece, block in zip(self._pieces, blocks, strict=True):
            if not piece.is_part and piece.key not in self._varying and not self._is_alone:
                plain[piece.key] = xxhash.xxh3_128_digest(memory.copy_out([block.tensor])[0])
        return Outline(sizes=sizes, plain=plain)


def _block(piece: Piece, key: str, tensor: torch.Tensor) -> Block:
    shape = tuple(tensor.shape)
    if piece.is_part:
        return Block(key, piece.size, piece.offset, tensor)
    return Block(key, shape, (0,) * len(shape), tensor)


# --- a whole --------------------------------------------------------------------------------------


def is_written(unfinished: pathlib.Path, ranks: int) -> bool:
    """Return whether all parts of a checkpoint are on the disk."""
    return all((shelf.part(unfinished, r) / shelf.SUMS).exists() for r in range(ranks))


def assemble(
    unfinished: pathlib.Path, *, step: int, job: str, replicas: Sequence[int]
) -> pathlib.Path:
    """Make a checkpoint of its parts, which are all there; return where it is."""
    firsts = sorted(set(replicas))
    outlines = {r: sealed.read(shelf.part(unfinished, r) / "outline", Outline) for r in firsts}
    apart = _apart(outlines)
    parts = [(shelf.part(unfinished, r), apart[first]) for r, first in enumerate(replicas)]
    metadata = distcp.merged(unfinished, parts)
    for first, outline in outlines.items():
        for key, size in outline.sizes.items():
            name = apart[first].get(key, key)
            if name not in metadata.state_dict_metadata and 0 not in size:
                msg = f"{unfinished}: `{name}` was not written"
                raise StateError(msg)
    distcp.describe(unfinished, metadata)
    manifest = shelf.Manifest(
        step=step,
        job=job,
        replicas=tuple(replicas),
        any_ranks=not any(apart.values()) and _are_alike(outlines),
        metadata=sealed.sum_of(unfinished / distcp.METADATA).hex(),
        files=shelf.listed(unfinished),
    )
    return shelf.publish(unfinished, manifest)


def _are_alike(outlines: dict[int, Outline]) -> bool:
    first, *others = outlines.values()
    return all(other.sizes == first.sizes for other in others)


def _apart(outlines: dict[int, Outline]) -> dict[int, dict[str, str]]:
    """Return other names for tensors that ranks call alike, and that are not the same."""
    known: dict[str, bytes] = {}
    found: dict[int, dict[str, str]] = {}
    for rank, outline in outlines.items():
        found[rank] = {
            key: named_apart(key, rank)
            for key, digest in outline.plain.items()
            if known.setdefault(key, digest) != digest
        }
    return found


def named_apart(key: str, rank: int) -> str:
    """Return the name of a tensor that only `rank`, and who replaces it, has under that name."""
    return f"{key}@{rank}"


# --- back -----------------------------------------------------------------------------------------


def check(stored: shelf.Stored, *, rank: int, ranks: int) -> None:
    """Read one rank's share of all files. Raises `StateError` naming one that is damaged.

    All shares together are the whole, each file once.
    """
    manifest, path = stored.manifest, stored.path
    if rank == 0 and sealed.sum_of(path / distcp.METADATA).hex() != manifest.metadata:
        msg = f"{path / distcp.METADATA} is damaged"
        raise StateError(msg)
    for number in range(rank, manifest.ranks, ranks):
        sealed.check(shelf.part(path, number))


class Place(NamedTuple):
    """Whose state is to be read."""

    rank: int
    ranks: int
    seed: int
    """The job's."""


def restore(stored: shelf.Stored, tracked: Tracked, place: Place, position: Position) -> bytes:
    """Put what is tracked to what it was, in place; return this rank's record.

    `position` is where this rank's data begins. Raises `StateError` if it does not fit, or cannot
    be read; what is tracked is of no use then.
    """
    manifest, path = stored.manifest, stored.path
    private = sealed.read(
        shelf.part(path, min(place.rank, manifest.ranks - 1)) / "private", Private
    )
    is_same = manifest.ranks == place.ranks and private.seat == tracked.seat()
    if not is_same:
        _refuse_apart(stored, tracked, place.ranks)
        private = sealed.read(shelf.part(path, place.rank % manifest.ranks) / "private", Private)
    reader = distcp.Reader(path)
    first = manifest.replicas[place.rank] if is_same else 0
    names = [_name(reader, key, first) for key in private.keys]
    header = _headers.decode(private.header)
    if not is_same:
        sizes = {number: reader.size(name) or () for number, name in enumerate(names)}
        header = pieces.reseated(tracked, header, sizes)
    try:
        landing = Landing(tracked, msgspec.msgpack.encode(header))
    except (StateError, KeyError) as error:
        msg = f"{path} is of another model, or tracks something else: {error}"
        raise StateError(msg) from error
    found = pieces.described(tracked, header.parts)
    triples = zip(found, names, landing.tensors, strict=True)
    reader.read([_block(piece, name, tensor) for piece, name, tensor in triples])
    landing.adopt()
    if is_same:
        return private.record
    return _moved(Record.decode(private.record), stored, place, position).encode()


def _name(reader: distcp.Reader, key: str, first: int) -> str:
    apart = named_apart(key, first)
    return key if reader.size(apart) is None else apart


def _refuse_apart(stored: shelf.Stored, tracked: Tracked, ranks: int) -> None:
    """Raise `StateError` if what was written by other ranks cannot be divided anew."""
    made_by, private, why = stored.manifest.ranks, tracked.parts(per_rank=True), ""
    if not stored.manifest.any_ranks:
        why = "its ranks held different things under the same names"
    elif own := [k for k, v in private.items() if not isinstance(v, ExtraPart)]:
        names = ", ".join(f"`{name}`" for name in own)
        why = f"what is tracked as per_rank, or is a random generator, belongs to those: {names}"
    if why:
        msg = f"{stored.path} was made by {made_by} ranks and cannot be loaded by {ranks}: {why}"
        raise StateError(msg)


def _moved(record: Record, stored: shelf.Stored, place: Place, position: Position) -> Record:
    """Return a record for a rank of another number of ranks.

    As many samples as all had read are taken as read; what does not divide is read again. Random
    numbers are other ones.
    """
    with rng.isolated(rng.derive("resume", place.seed, place.rank, stored.step)):
        streams = rng.capture()
    there = record.position
    if there is not None:
        before, now = there.shares or stored.manifest.ranks, position.shares or place.ranks
        batch = there.batch * before // now
        there = msgspec.structs.replace(position, pass_=there.pass_, batch=batch, state=b"")
    return msgspec.structs.replace(record, streams=streams, position=there)
