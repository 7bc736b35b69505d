"""Tensors in the format of `torch.distributed.checkpoint`, without a collective.

Each rank writes a directory as if it were alone; `merged` puts what describes them together, so
that the whole is read, in whatever parts, by `torch.distributed.checkpoint` itself.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tmover.errors import StateError

METADATA = ".metadata"
"""The file that says where each tensor is."""


class Block(NamedTuple):
    """A tensor, or a part of one: where it lies in the whole, and its memory."""

    key: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def known_by(self) -> MetadataIndex:
        """What it is found by."""
        return MetadataIndex(self.key, self.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)


class _Saving(SavePlanner):
    """Gives the writer the tensors it asks for."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._tensors = {block.known_by: block.tensor for block in blocks}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return what is to be written."""
        return self._tensors[write_item.index]

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be prepared: the plan is made by `write`."""

    create_local_plan = create_global_plan = finish_plan = set_up_planner  # type: ignore[assignment]  # not called


class _Loading(LoadPlanner):
    """Says where the reader puts what it reads."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._tensors = {block.key: block.tensor for block in blocks}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of a tensor that is to be overwritten."""
        found = self._tensors[read_item.dest_index.fqn].detach()
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(spans):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: it was read in place."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be prepared: the plan is made by `read`."""

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner  # type: ignore[assignment]  # not called


def write(directory: pathlib.Path, blocks: Sequence[Block]) -> None:
    """Write the tensors, which are in host memory, and have them on the disk."""
    items = [
        WriteItem(
            index=block.known_by,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=block.chunk,
                properties=TensorProperties(dtype=block.tensor.dtype),
                size=torch.Size(block.size),
            ),
        )
        for block in blocks
        if block.tensor.numel() or not math.prod(block.size)
    ]
    writer = FileSystemWriter(directory)
    writer.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan([SavePlan(items)])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(plan, _Saving(blocks)).wait()
    writer.finish(metadata, [results])


def merged(whole: pathlib.Path, parts: Sequence[tuple[pathlib.Path, dict[str, str]]]) -> Metadata:
    """Return what describes the parts as one. Of what several have, the first counts.

    With each part comes under which names some of its tensors are to be found instead. Raises
    `StateError` if something of a tensor is missing.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, Any] = {}
    for path, names in parts:
        of_part = FileSystemReader(path).read_metadata()
        for key, described in of_part.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata)  # noqa: S101 - `write` writes no others
            name = names.get(key, key)
            known = tensors.setdefault(name, dataclasses.replace(described, chunks=[]))
            for chunk in described.chunks:
                index = MetadataIndex(name, chunk.offsets)
                if index not in places:
                    place = of_part.storage_data[MetadataIndex(key, chunk.offsets)]
                    inside = path.relative_to(whole) / place.relative_path
                    places[index] = dataclasses.replace(place, relative_path=inside.as_posix())
                    known.chunks.append(chunk)
    for name, described in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in described.chunks) != math.prod(described.size):
            msg = f"{whole}: of `{name}` not every part was written"
            raise StateError(msg)
    return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta())


def describe(whole: pathlib.Path, metadata: Metadata) -> None:
    """Write what describes a whole checkpoint, and have it on the disk."""
    FileSystemWriter(whole).finish(metadata, [list(_results(metadata))])


def _results(metadata: Metadata) -> Iterable[Any]:
    from torch.distributed.checkpoint.storage import WriteResult

    for index, place in metadata.storage_data.items():
        yield WriteResult(index, place.length, place)


class Reader:
    """A whole checkpoint, to be read in any parts."""

    def __init__(self, whole: pathlib.Path) -> None:
        """Read what describes it. Raises `StateError` if that cannot be read."""
        self._whole = whole
        self._reader = FileSystemReader(whole)
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            msg = f"{whole}: its .metadata cannot be read: {error!r}"
            raise StateError(msg) from error

    def size(self, key: str) -> tuple[int, ...] | None:
        """Return the size of a tensor, None if it is not there."""
        found = self._metadata.state_dict_metadata.get(key)
        return tuple(found.size) if isinstance(found, TensorStorageMetadata) else None

    def read(self, blocks: Sequence[Block]) -> None:
        """Overwrite the blocks' memory. Raises `StateError` naming what is not there."""
        items: list[ReadItem] = []
        for block in blocks:
            found = self._metadata.state_dict_metadata.get(block.key)
            if not isinstance(found, TensorStorageMetadata) or tuple(found.size) != block.size:
                has = "is not in it" if found is None else f"has {self.size(block.key)} in it"
                msg = f"{self._whole}: `{block.key}`, of shape {block.size} here, {has}"
                raise StateError(msg)
            if block.tensor.numel():
                items += create_read_items_for_chunk_list(block.key, found, [block.chunk])
        self._reader.set_up_storage_reader(self._metadata, False)  # noqa: FBT003 - torch's way
        try:
            with torch.no_grad():
                self._reader.read_data(LoadPlan(items), _Loading(blocks)).wait()
        except Exception as error:
            msg = f"{self._whole} cannot be read: {error!r}"
            raise StateError(msg) from error
