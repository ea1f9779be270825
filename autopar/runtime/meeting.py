"""Ranks check that all of them ask, where a script first asks for the whole of a sharded tensor.

Each rank holds a part, so all must ask. A rank that asks alone, as below `if rank == 0`, would
enter a collective that the others never enter, or that they take for another one.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar._compat import default_store
from autopar.errors import AutoparError
from autopar.runtime.agree import patience_s

__all__ = ["meet"]

_LIBRARIES = tuple(str(Path(str(m.__file__)).parent) + os.sep for m in (torch, autopar))

_met: set[tuple[str, str]] = set()


def meet(mesh: DeviceMesh) -> None:
    """Wait until all ranks of a mesh have come here, the first time that a line of a script does.

    Raises:
        AutoparError: others do not come within `$AUTOPAR_TIMEOUT_S` seconds (default 300).
    """
    place = _line_of_script()
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    group = ",".join(map(str, ranks))
    if len(ranks) == 1 or (group, place) in _met:
        return
    store = default_store()
    keys = {rank: f"autopar/met/{group}/{place}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], "")
    patience = patience_s()
    try:
        store.wait(list(keys.values()), timedelta(seconds=patience))
    except RuntimeError as error:  # torch's DistStoreError
        missing = ", ".join(str(rank) for rank in ranks if not store.check([keys[rank]]))
        raise AutoparError(
            f"rank {dist.get_rank()} asks for the whole of a sharded tensor at {place}, for which "
            f"ranks {missing} did not come in {patience:g} s. Each rank holds a part of it, so "
            "that all have to ask: compute the number on every rank, and print it on one."
        ) from error
    _met.add((group, place))


def _line_of_script() -> str:
    """File and line of the innermost call that is not torch's or autopar's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
