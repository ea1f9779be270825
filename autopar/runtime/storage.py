"""Boxes of tensors to and from files, by `torch.distributed.checkpoint` (DCP).

DCP plans who writes which copy, writes a file per rank, tells all ranks of one's failure, and reads
the parts of files that a box overlaps. Three things are ours: a tensor may have several boxes on a
rank; DCP's pickled index is JSON here, so that reading runs no code: tensors are read with
`weights_only`; and the index has a checksum of each box, and of the other files in the folder.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from torch.distributed.checkpoint.planner import (
    LoadPlanner as DCPLoadPlanner,
)
from torch.distributed.checkpoint.planner import (
    SavePlanner as DCPSavePlanner,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopar.errors import CheckpointError
from autopar.runtime.pieces import Piece

__all__ = ["INDEX", "Index", "LoadPlanner", "Reader", "SavePlanner", "Writer", "write_file"]

INDEX = "index.json"
_VERSION = 1
_OTHERS = (".pt", ".json")  # suffixes of the files that DCP does not write
_PART = 1 << 24  # bytes that are read at once for a checksum
_DELAY_S = 10.0  # after which a shared folder shows what others wrote


def write_file(path: Path, data: bytes) -> None:
    """Write a file, on the disk when this returns."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


class _Place(NamedTuple):
    """Where a box, or a whole file, is stored, under the names that DCP's reader asks for."""

    relative_path: str
    offset: int
    length: int
    checksum: int | None = None  # unknown of checkpoints that earlier versions wrote
    transform_descriptors: None = None

    def read_checksum(self, folder: Path) -> int:
        """CRC-32 of what is there."""
        found, left = 0, self.length
        with (folder / self.relative_path).open("rb") as stream:
            stream.seek(self.offset)
            while left and (part := stream.read(min(left, _PART))):
                found, left = zlib.crc32(part, found), left - len(part)
        return found

    def check(self, folder: Path) -> None:
        """Raises:
        CheckpointError: other bytes are there than were written.
        """
        if self.checksum is not None and self.checksum != self.read_checksum(folder):
            raise CheckpointError(
                f"{folder / self.relative_path} is damaged: its {self.length} bytes from "
                f"{self.offset} on are not those that were written. Copy it again, or load an "
                "earlier checkpoint"
            )


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
                stored = [place.relative_path, place.offset, place.length, place.checksum]
                boxes.append([list(chunk.offsets), list(chunk.sizes), stored])
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(entry.size), "dtype": dtype, "boxes": boxes}
        others = (p for p in sorted(folder.iterdir()) if p.suffix in _OTHERS)
        places = [_Place(p.name, 0, p.stat().st_size) for p in others]
        files = {p.relative_path: [p.length, p.read_checksum(folder)] for p in places}
        text = json.dumps({"version": _VERSION, "files": files, "tensors": tensors})
        write_file(folder / INDEX, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Raises:
        CheckpointError: no index, a damaged one, files that are missing or too short, or others
            than tensors' that are damaged.
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
            files = [_Place(_inside(n), 0, *told) for n, told in data.get("files", {}).items()]
            for name, entry in data["tensors"].items():
                entries[name], stored = _entry(name, entry)
                places.update(stored)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}): load an earlier checkpoint"
            ) from error
        for name, found, size in _damaged(folder, [*places.values(), *files]):
            raise CheckpointError(
                f"{folder / name} {found}, {size} bytes were written to it: copy it again, or load "
                "an earlier checkpoint"
            )
        for place in files:
            place.check(folder)
            if (folder / place.relative_path).stat().st_size > place.length:
                raise CheckpointError(
                    f"{folder / place.relative_path} is damaged: it has grown. Copy it again, or "
                    "load an earlier checkpoint"
                )
        return cls(Metadata(dict(entries), storage_data=places))


def _inside(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of the checkpoint")
    return name


def _entry(name: str, entry: Any) -> tuple[TensorStorageMetadata, dict[MetadataIndex, _Place]]:
    chunks, places = [], {}
    for offsets, sizes, (path, offset, length, *checksum) in entry["boxes"]:
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        chunks.append(chunk)
        place = _Place(_inside(path), int(offset), int(length), *checksum)
        places[MetadataIndex(name, chunk.offsets)] = place
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a dtype")
    return (
        TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=torch.Size(entry["shape"]), chunks=chunks
        ),
        places,
    )


def _damaged(folder: Path, places: Iterable[_Place]) -> list[tuple[str, str, int]]:
    """Files that are missing or too short: their names, what is wrong, and the bytes written."""
    ends: dict[str, int] = {}
    for place in places:
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    found = []
    for name, end in sorted(ends.items()):
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size is None or size < end:
            found.append((name, "is missing" if size is None else f"has {size} bytes", end))
    return found


class Writer(FileSystemWriter):
    """Writes to a folder, and calls `commit` on one rank when all ranks have written."""

    def __init__(self, folder: Path, commit: Callable[[], None]) -> None:
        super().__init__(folder)
        self.folder = folder
        self.commit = commit

    def write_data(self, plan: SavePlan, planner: DCPSavePlanner) -> Future[list[WriteResult]]:
        told: list[WriteResult] = []
        for result in super().write_data(plan, planner).wait():
            place = _Place(*(getattr(result.storage_data, name) for name in _Place._fields[:3]))
            place = place._replace(checksum=place.read_checksum(self.folder))
            told.append(replace(result, storage_data=place))
        written: Future[list[WriteResult]] = Future()
        written.set_result(told)
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        self._check_seen(list(metadata.storage_data.values()))
        Index(metadata).write(self.folder)
        self.commit()

    def _check_seen(self, places: Sequence[_Place]) -> None:
        """That this rank sees what the others have written, if not at once."""
        deadline = time.monotonic() + _DELAY_S
        while missing := _damaged(self.folder, places):
            if time.monotonic() > deadline:
                name, found, size = missing[0]
                raise CheckpointError(
                    f"{self.folder / name} {found}, another rank has written {size} bytes to it: "
                    "save to a folder that all ranks see, by its absolute path"
                )
            time.sleep(_DELAY_S / 50)


class Reader(FileSystemReader):
    """Reads the boxes of an index from its folder."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self.index = index

    def read_data(self, plan: LoadPlan, planner: DCPLoadPlanner) -> Future[None]:
        stored = self.index.metadata.storage_data
        for place in sorted({stored[item.storage_index] for item in plan.items}):
            place.check(Path(self.path))
        return super().read_data(plan, planner)

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
