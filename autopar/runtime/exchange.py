"""Weights from and to safetensors, in the layout of Hugging Face.

    path/model.safetensors                          or, above `max_file_bytes`,
    path/model-00001-of-00002.safetensors, …        with model.safetensors.index.json

Each rank reads only the boxes that it holds. To resume a run, use checkpoints: these files hold
neither optimizer states nor counters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import CheckpointError
from autopar.runtime.agree import agreed, reason
from autopar.runtime.module import ParallelModule
from autopar.runtime.pieces import pieces
from autopar.runtime.state_module import check_installed, check_parallel
from autopar.runtime.whole_model import WholeModel

__all__ = ["load_safetensors", "save_safetensors"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def save_safetensors(
    path: str | Path, module: ParallelModule, *, max_file_bytes: int = 5 * 10**9
) -> None:
    """Write parameters and persistent buffers as safetensors. Every rank calls this.

    Tensors are gathered one by one, from all stages of a pipeline, and tied ones are written once;
    rank 0 needs memory for one file.

    Args:
        path: folder, which `from_pretrained` reads if the model's config is there too.
        module: the parallel module.
        max_file_bytes: size of a file, which only a single larger tensor exceeds.

    Raises:
        CheckpointError: the files cannot be written; on every rank.
    """
    check_parallel(module)
    folder = Path(path)
    model = WholeModel(module)
    files = _files(model.tensors, max_file_bytes)
    failure: Exception | None = None
    for name, names in files.items():
        held: dict[str, Tensor] = {}
        for key in names:
            whole = model.on_first(key)
            if whole is not None and failure is None:
                held[key] = whole
        if held:
            failure = _written(folder, name, partial(_save, held))
    if dist.get_rank() == 0 and failure is None:
        if len(files) > 1:
            text = _index(model.tensors, files)
            failure = _written(folder, _INDEX, lambda path: path.write_text(text))
        # of an earlier model here, that whoever reads the folder may prefer
        stale = folder / (_SINGLE if len(files) > 1 else _INDEX)
        failure = failure or _removed(stale)
    agreed(failure, {})


def _index(tensors: Mapping[str, Tensor], files: Mapping[str, list[str]]) -> str:
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map = {key: name for name, names in files.items() for key in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)


def _files(tensors: Mapping[str, Tensor], max_file_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each file."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = math.prod(tensor.shape) * tensor.element_size()
        if parts[-1] and size + num_bytes > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += num_bytes
    if len(parts) == 1:
        return {_SINGLE: parts[0]}
    count = len(parts)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": p for i, p in enumerate(parts, 1)}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _written(folder: Path, name: str, write: Callable[[Path], Any]) -> Exception | None:
    """Let `write` write a file, which then gets its name; what went wrong."""
    scratch = folder / f".{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(scratch)
        scratch.replace(folder / name)
    except Exception as error:
        return CheckpointError(f"{folder / name} was not written: {reason(error)}")
    return None


def _removed(path: Path) -> Exception | None:
    """Remove a file if it is there; what went wrong."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return CheckpointError(f"{path} is of an earlier model and was not removed: {error}")
    return None


def load_safetensors(
    path: str | Path,
    module: ParallelModule,
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
) -> None:
    """Read safetensors into parameters and persistent buffers. Every rank calls this.

    Each rank reads only what it holds. Values of another floating dtype are cast.

    Args:
        path: a file, or a folder with one file or with an index of several.
        module: the parallel module.
        rename: maps an FQN of the module to its name in the files; default: the same name.
        strict: names in the files that the model does not have are an error.

    Raises:
        CheckpointError: files are missing or damaged, tensors are missing or have another shape; on
            every rank. The module is unchanged, unless reading itself failed.
        AutoparError: there are no parameters to fill before the first call.
    """
    check_parallel(module)
    check_installed(module)
    tensors = module.saved_tensors()
    with ExitStack() as stack:
        places: dict[str, _Place] = {}
        with _told(path):
            opened = _opened(Path(path), stack)
            places = _places(Path(path), module, opened, rename or (lambda name: name), strict)
        with _told(path), torch.no_grad():
            for piece in pieces(tensors):
                piece.value.copy_(_box(*places[piece.name], piece.index))


_Place = tuple[Any, str]  # an open file, and a name in it


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    """What goes wrong inside on one rank is a `CheckpointError` on all of them. Collective."""
    failure: Exception | None = None
    try:
        yield
    except CheckpointError as error:
        failure = error
    except Exception as error:
        failure = CheckpointError(f"{path} cannot be read: {reason(error)}")
    agreed(failure, {})


def _opened(path: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each name."""
    from safetensors import safe_open

    opened = [stack.enter_context(safe_open(p, framework="pt")) for p in _paths(path)]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def _places(
    path: Path,
    module: ParallelModule,
    where: Mapping[str, Any],
    rename: Callable[[str], str],
    strict: bool,
) -> dict[str, _Place]:
    """Where each tensor is to be read, all of which fit."""
    tensors = module.saved_tensors()
    found = _found(path, module, tensors, where, rename, strict)
    for name, key in found.items():
        there = tuple(where[key].get_slice(key).get_shape())
        if there != tuple(tensors[name].shape):
            raise CheckpointError(
                f"{name} has shape {tuple(tensors[name].shape)} in the model and {there} as "
                f"{key} in {path}"
            )
    return {name: (where[key], key) for name, key in found.items()}


def _paths(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    if (path / _INDEX).exists():
        names = set(json.loads((path / _INDEX).read_text())["weight_map"].values())
        return [path / Path(name).name for name in sorted(names)]
    if (path / _SINGLE).exists():
        return [path / _SINGLE]
    raise CheckpointError(f"there is neither {_SINGLE} nor {_INDEX} in {path}")


def _found(
    path: Path,
    module: ParallelModule,
    tensors: Mapping[str, Tensor],
    where: Mapping[str, Any],
    rename: Callable[[str], str],
    strict: bool,
) -> dict[str, str]:
    """Name in the files of each tensor, which may be stored under any of its tied names."""
    found: dict[str, str] = {}
    used: set[str] = set()
    for entry in module.names:
        key = rename(entry.name)
        used.add(key)
        if key in where and entry.owner in tensors:
            found.setdefault(entry.owner, key)
    missing, strange = sorted(tensors.keys() - found.keys()), sorted(where.keys() - used)
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors of the model: {', '.join(missing[:3])}; "
            f"its names are like {', '.join(list(where)[:3])} (see rename=)"
        )
    if strict and strange:
        raise CheckpointError(
            f"{path} has {len(strange)} tensors that the model has not: {', '.join(strange[:3])}; "
            "pass strict=False to leave them out"
        )
    return found


def _box(file: Any, key: str, index: tuple[slice, ...]) -> Tensor:
    value: Tensor = file.get_slice(key)[index] if index else file.get_tensor(key)
    return value
