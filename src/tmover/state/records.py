"""What one rank alone holds, as bytes that its keeper can hold for it.

Random number streams, the loader's position, buffers that differ by rank, and objects tracked with
`per_rank`. A dead rank's step is repeated from its record and any other rank's replicated state.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import torch
import xxhash

from tmover.errors import StateError
from tmover.state import memory, rng, tree
from tmover.state.capture import Tracked, canonical
from tmover.state.landing import Places
from tmover.state.memory import Layout
from tmover.state.position import Position

_DIGEST_BYTES = 16


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's private state as of a vote; the step after it opens with exactly this."""

    streams: bytes
    position: Position | None
    layouts: tuple[Layout, ...]
    tensors: tuple[bytes, ...]
    buffers: dict[str, dict[str, int]]
    """Index of the tensor by tracked name and buffer."""
    objects: dict[str, Any]
    """Packed trees by tracked name."""
    at_boundary: bool = False
    """Whether buffers and objects are as of the boundary after the vote, and not of the vote."""

    @classmethod
    def capture(
        cls, tracked: Tracked, *, position: Position | None, streams: bytes | None = None
    ) -> Record:
        """Return this rank's private state. `streams` spares capturing the random streams."""
        tensors = tree.Tensors()
        buffers = {
            name: {key: tensors.add(tensor) for key, tensor in inner.items()}
            for name, inner in tracked.buffers.varying().items()
        }
        parts = tracked.parts(per_rank=True)
        objects = {name: tracked.pack(each, tensors) for name, each in parts.items()}
        return cls(
            streams=rng.capture() if streams is None else streams,
            position=position,
            layouts=tuple(memory.layout(tensor) for tensor in tensors.held),
            tensors=tuple(memory.copy_out(tensors.held)),
            buffers=buffers,
            objects=objects,
        )

    def encode(self) -> bytes:
        """Return the record as bytes, with a hash of them in front."""
        data = msgspec.msgpack.encode(self)
        return xxhash.xxh3_128_digest(data) + data

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Return the record. Raises `StateError` if a single bit of it is not as it was."""
        if xxhash.xxh3_128_digest(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            msg = "a rank's private record is damaged"
            raise StateError(msg)
        try:
            record = _decoder.decode(memoryview(data)[_DIGEST_BYTES:])
        except (msgspec.DecodeError, RecursionError) as error:
            msg = f"a rank's private record cannot be read: {error}"
            raise StateError(msg) from error
        indices = [index for inner in record.buffers.values() for index in inner.values()]
        known = range(len(record.tensors))
        if len(record.layouts) != len(known) or any(index not in known for index in indices):
            msg = "a rank's private record refers to tensors it does not hold"
            raise StateError(msg)
        return record

    @classmethod
    def digest(cls, data: bytes) -> str:
        """Return a SHA-256 of what the encoded record holds, whatever order it was made in."""
        if not data:
            return ""
        record = cls.decode(data)
        content = [record.streams, record.position, record._values()]
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()

    def _values(self) -> list[Any]:
        """Return names and hashes of what is held beside streams and position, in a fixed order."""
        hashes = [
            [each.dtype, list(each.shape), hashlib.sha256(content).hexdigest()]
            for each, content in zip(self.layouts, self.tensors, strict=True)
        ]
        buffers = [
            [f"{name}.{key}", hashes[index]]
            for name, inner in self.buffers.items()
            for key, index in inner.items()
        ]
        objects = [[k, canonical(packed, hashes)] for k, packed in self.objects.items()]
        return sorted(buffers) + sorted(objects)

    def drift(self, tracked: Tracked) -> list[str]:
        """Return the names of a rank's own buffers and objects that are not as recorded.

        Objects should not be among them when the next step opens: the joiner of a lost rank, which
        continues from this record, would not have what changed since. Buffers may be, if they
        change alike on every rank (the count of an averaged model does): the sender of the
        replicated state says so.
        """
        now = Record.capture(tracked, position=None, streams=self.streams)._values()
        recorded = dict(self._values())
        return [name for name, value in now if recorded.get(name) != value]

    def renewed(self, tracked: Tracked) -> Record:
        """Return the record with the rank's own buffers and objects as they are now.

        Streams and position stay those of the vote: every rank's next step opens with them.
        """
        now = Record.capture(tracked, position=self.position, streams=self.streams)
        return msgspec.structs.replace(now, at_boundary=True)

    def late(self, tracked: Tracked) -> list[str]:
        """Return the `per_rank` objects that changed since: no keeper has them as they are."""
        return [name for name in self.drift(tracked) if name in tracked.parts(per_rank=True)]

    def unknown(self, other: Record, tracked: Tracked) -> list[str]:
        """Return what has changed since the vote, and is known neither by `other` nor as alike.

        What a joiner was told to have changed is as new in its own record: that of a buffer is
        taken to be alike, as nobody can tell any more.
        """
        if other.at_boundary:
            return []
        mine, theirs = dict(self._values()), dict(other._values())
        private, drift = tracked.parts(per_rank=True), self.drift(tracked)
        unlike = [name for name in drift if name in private or mine.get(name) != theirs.get(name)]
        return unlike + [name for name in sorted(tracked.newer) if name in private]

    def refuse_unknown(self, other: Record, tracked: Tracked) -> None:
        """Raise `StateError` if what `other`'s rank holds now is known to nobody.

        This is a survivor's record of a vote and `other` a lost rank's. What has changed here since
        has changed there too, and is known if it was equal before: then it changes alike.
        """
        unknown = self.unknown(other, tracked)
        if unknown:
            msg = (
                f"the lost rank's {', '.join(f'`{name}`' for name in unknown)} changed after the "
                "vote and is lost with it: change what differs by rank before optimizer.step(); "
                "start the job again from a checkpoint"
            )
            raise StateError(msg)

    def restore_rng(self) -> None:
        """Put the random streams where they stood."""
        rng.restore(self.streams)

    def restore_private(self, tracked: Tracked) -> None:
        """Set the buffers and objects that are this rank's own; streams and loader are not touched.

        To be called after the replicated state was adopted: buffers that its sender has changed
        since stay as it sent them, if this record is of the vote. Raises `StateError` if it does
        not fit.
        """
        parts = tracked.parts(per_rank=True)
        if parts.keys() != self.objects.keys():
            msg = f"private state of {sorted(self.objects)} came for {sorted(parts)}"
            raise StateError(msg)
        pairs = zip(self.tensors, self.layouts, strict=True)
        values = [memory.from_bytes(content, described) for content, described in pairs]
        places = Places(self.layouts)
        with torch.no_grad():
            for name, each in parts.items():
                places.find(each, tree.unpack(self.objects[name]))
            for index in places.indices():
                memory.put(places[index], values[index])
            for name, each in parts.items():
                each.adopt(tree.unpack(self.objects[name], places))
        tracked.buffers.apply(
            {
                name: {key: values[index] for key, index in inner.items()}
                for name, inner in self.buffers.items()
            },
            newer=frozenset() if self.at_boundary else tracked.newer,
        )


_decoder = msgspec.msgpack.Decoder(Record)
