"""Boxes of tensors to and from files, by `torch.distributed.checkpoint` (DCP).

DCP plans who writes which copy, writes a file per rank, tells all ranks of one's failure, and reads
the parts of files that a box overlaps. Two things are ours: a tensor may have several boxes on a
rank, and DCP's pickled index is JSON here, so that reading runs no code: tensors are read with
`weights_only`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.errors import CheckpointError
from autopar.runtime.pieces import Piece

__all__ = ["INDEX", "Index", "LoadPlanner", "Reader", "SavePlanner", "Writer", "write_file"]

INDEX = "index.json"
_VERSION = 1


def write_file(path: Path, data: bytes) -> None:
    """Write a file, on the disk when this returns."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


class _Place(NamedTuple):
    """Where a box is stored, under the names that DCP's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class Index:
    """What a checkpoint holds: shape, dtype and boxes of each tensor, and where they are stored."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def write(self, folder: Path) -> None:
        tensors = {}
        for name, entry in self.tensors.items():
            boxes = []
            for chunk in entry.chunks:
                place = self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                stored = [place.relative_path, place.offset, place.length]
                boxes.append([list(chunk.offsets), list(chunk.sizes), stored])
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(entry.size), "dtype": dtype, "boxes": boxes}
        text = json.dumps({"version": _VERSION, "tensors": tensors})
        write_file(folder / INDEX, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Raises:
        CheckpointError: no index, a damaged one, or files that are missing or too short.
        """
        path = folder / INDEX
        try:
            data = json.loads(path.read_text())
            if data["version"] != _VERSION:
                raise CheckpointError(
                    f"{path} has version {data['version']}, this autopar reads {_VERSION}"
                )
            entries: dict[str, TensorStorageMetadata] = {}
            places: dict[MetadataIndex, _Place] = {}
            for name, entry in data["tensors"].items():
                entries[name], stored = _entry(name, entry)
                places.update(stored)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}): load an earlier checkpoint"
            ) from error
        _check_files(folder, places)
        return cls(Metadata(dict(entries), storage_data=places))


def _entry(name: str, entry: Any) -> tuple[TensorStorageMetadata, dict[MetadataIndex, _Place]]:
    chunks, places = [], {}
    for offsets, sizes, (path, offset, length) in entry["boxes"]:
        if Path(path).name != path:
            raise ValueError(f"{path!r} is not a file of the checkpoint")
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        chunks.append(chunk)
        places[MetadataIndex(name, chunk.offsets)] = _Place(path, int(offset), int(length))
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a dtype")
    return (
        TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=torch.Size(entry["shape"]), chunks=chunks
        ),
        places,
    )


def _check_files(folder: Path, places: dict[MetadataIndex, _Place]) -> None:
    ends: dict[str, int] = {}
    for place in places.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in sorted(ends.items()):
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{path} {found}, {end} bytes were written to it: copy it again, or load an "
                "earlier checkpoint"
            )


class Writer(FileSystemWriter):
    """Writes to a folder, and calls `commit` on one rank when all ranks have written."""

    def __init__(self, folder: Path, commit: Callable[[], None]) -> None:
        super().__init__(folder)
        self.folder = folder
        self.commit = commit

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        Index(metadata).write(self.folder)
        self.commit()


class Reader(FileSystemReader):
    """Reads the boxes of an index from its folder."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self) -> Metadata:  # without DCP's keywords, which ask for other files
        return self.index.metadata


def _key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


class SavePlanner(DefaultSavePlanner):
    """Plans the boxes of a rank. The state dict of DCP has an entry for each, by `state_dict`."""

    def __init__(self, boxes: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # what is written comes from DCP, which may have copied it
        self.boxes = [(p.name, torch.Size(p.shape), torch.Size(p.offsets)) for p in boxes]

    @staticmethod
    def state(boxes: Sequence[Piece]) -> dict[str, Tensor]:
        """The state dict to give to DCP."""
        return {_key(p.name, p.offsets): p.value for p in boxes}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, shape, offsets in self.boxes:
            value = self.state_dict[_key(name, offsets)]
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=value.size()),
                properties=TensorProperties(dtype=value.dtype),
                size=shape,
            )
            index = MetadataIndex(name, offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        assert index.offset is not None
        value = self.state_dict[_key(index.fqn, index.offset)]
        return value.contiguous()


class LoadPlanner(DefaultLoadPlanner):
    """Plans to fill the boxes of a rank, in place."""

    def __init__(self, boxes: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = {(p.name, torch.Size(p.offsets)): p.value for p in boxes}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for (name, offsets), value in self.boxes.items():
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=value.size())
            wanted.setdefault(name, []).append(chunk)
        items = []
        for name, chunks in wanted.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(name, entry, chunks)
            self._check_covered(name, chunks, found)
            items += found
        return LoadPlan(items)

    @staticmethod
    def _check_covered(name: str, chunks: Sequence[ChunkStorageMetadata], items: Any) -> None:
        needed = sum(chunk.sizes.numel() for chunk in chunks)
        there = sum(item.lengths.numel() for item in items)
        if there != needed:
            raise CheckpointError(
                f"the checkpoint holds {there} of the {needed} elements of {name} that this rank "
                "needs: it was not written whole"
            )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.fqn, index.offset]
