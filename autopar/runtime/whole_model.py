"""Gathers the tensors of a whole model, one after the other, on the first rank.

A rank of a pipeline holds those of its own stages. Ranks tell each other what they hold; then the
ranks of one stage gather a tensor, and the one of them that shares a line with rank 0 sends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import CheckpointError
from autopar.runtime.lost import naming_lost_ranks
from autopar.runtime.pipeline import PipelinedStep

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["WholeModel"]


class WholeModel:
    """Parameters and persistent buffers of all stages, each tied one once. Collective.

    Args:
        module: with its plan.

    Attributes:
        tensors: a stand-in on meta of each whole tensor, by FQN, in the model's order.

    Raises:
        CheckpointError: no rank holds a tensor of the model.
    """

    def __init__(self, module: ParallelModule) -> None:
        step = module.first_step
        self.device = module.device
        self.held = module.saved_tensors()
        self.mesh = None
        mine = {n: (tuple(t.shape), t.dtype) for n, t in self.held.items()}
        everyone = [mine]
        if isinstance(step, PipelinedStep) and step.pipeline.size > 1:
            self.mesh = step.mesh
            everyone = [{} for _ in range(step.pipeline.size)]
            dist.all_gather_object(everyone, mine, group=self.mesh.line)
        # a buffer is on all ranks
        self.giver = {n: r for r, names in reversed([*enumerate(everyone)]) for n in names}
        wanted = dict.fromkeys(entry.owner for entry in module.names if entry.persistent)
        lost = [name for name in wanted if name not in self.giver]
        if lost:
            raise CheckpointError(f"no rank holds {len(lost)} tensors: {', '.join(lost[:3])}")
        self.tensors: dict[str, Tensor] = {}
        for name in wanted:
            shape, dtype = everyone[self.giver[name]][name]
            self.tensors[name] = torch.empty(shape, dtype=dtype, device="meta")

    def on_first(self, name: str) -> Tensor | None:
        """A whole tensor on rank 0, on the CPU; None on the others. Collective."""
        first = dist.get_rank() == 0
        value: Tensor | None = None
        if self.mesh is None or self.giver[name] == self.mesh.rank:
            tensor = self.held[name].detach()
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            value = value.contiguous()
        if self.mesh is not None:
            value = self._sent(name, value)
        return value.cpu() if first and value is not None else None

    def _sent(self, name: str, value: Tensor | None) -> Tensor | None:
        """What a stage has gathered goes to rank 0, along its line."""
        assert self.mesh is not None
        line, first = self.mesh.line, dist.get_rank() == 0
        if 0 not in dist.get_process_group_ranks(line):
            return None
        with naming_lost_ranks("while the model is gathered"):
            if value is not None and not first and value.numel():
                dist.send(_bytes(value), group=line, group_dst=dist.get_group_rank(line, 0))
            if value is None and first:
                value = torch.empty_like(self.tensors[name], device=self.device)
                if value.numel():
                    dist.recv(_bytes(value), group=line, group_src=self.giver[name])
        return value


def _bytes(value: Tensor) -> Tensor:
    """A view that backends send whatever the dtype is."""
    return value.reshape(-1).view(torch.uint8)
