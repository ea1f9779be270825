"""The same training step by autopar and by torch's own ways: DDP, FSDP2, TP, TP with FSDP2."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import autopar
from autopar.runtime.live import LiveBytes
from benchmarks.models import build

__all__ = ["Contender", "contenders", "loopback_bytes"]


@dataclass
class Contender:
    """One way to run a step.

    Attributes:
        name: of the way.
        model: what holds the parameters.
        step: forward and backward; returns the loss of the global batch.
        note: what plan was chosen, for autopar's.
    """

    name: str
    model: nn.Module
    step: Callable[[], torch.Tensor]
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # the fused update takes no DTensors beside plain tensors
        groups: dict[type, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            groups.setdefault(type(parameter.data), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()], lr=1e-3, fused=True
        )

    def run(self) -> float:
        """One step with its update; returns the loss."""
        loss = self.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def timed(self) -> None:
        """Run a step between barriers and note seconds, this rank's CPU seconds and bytes."""
        dist.barrier()
        sent, start, cpu = loopback_bytes(), time.perf_counter(), time.process_time()
        self.run()
        self.cpu_seconds.append(time.process_time() - cpu)
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.sent.append((loopback_bytes() - sent) / dist.get_world_size())

    def peak_bytes(self) -> int:
        """Largest sum of live tensors in a forward and backward, states included."""
        live = LiveBytes()
        states = [list(state.values()) for state in self.optimizer.state.values()]
        live.hold([list(self.model.parameters()), list(self.model.buffers()), states])
        with live:
            self.step()
        self.optimizer.zero_grad()
        return live.peak_bytes


def loopback_bytes() -> int:
    """Bytes that all processes of this machine have sent over loopback."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    return 0


def contenders(name: str, cluster: autopar.Cluster, constraints: Any = None) -> list[Contender]:
    """Every way to run the model on all ranks, from the same weights.

    Args:
        name: of `benchmarks.models`.
        cluster: what autopar plans for.
        constraints: what autopar's plan is pinned to.
    """
    world = dist.get_world_size()
    found = [_autopar(name, cluster, constraints)]
    if world == 1:
        found.append(_eager(name))
        compiled = _compiled(name)
        return [*found, compiled] if compiled else found
    found += [_ddp(name), _fsdp(name), _tensor(name, init_device_mesh("cpu", (world,)))]
    if world % 4 == 0:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        found.append(_tensor(name, mesh["tp"], mesh["dp"]))
    return found


def _autopar(name: str, cluster: autopar.Cluster, constraints: Any) -> Contender:
    model, inputs = build(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = autopar.parallelize(model, mesh, inputs, cluster=cluster, constraints=constraints)
    modes = ", ".join(sorted(set(parallel.plan.modes.values())))
    note = f"mesh {parallel.plan.mesh_shape}: {modes}"
    return Contender("autopar", parallel, lambda: parallel.train_step(**inputs), note)


def _backward(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach()


def _eager(name: str) -> Contender:
    model, inputs = build(name)
    return Contender("eager", model, lambda: _backward(model, inputs))


def _compiled(name: str) -> Contender | None:
    """torch.compile's, where its compiler works."""
    model, inputs = build(name)
    compiled = torch.compile(model)
    try:
        _backward(compiled, inputs)
    except Exception as error:  # no working compiler on this machine: the table says so
        print(f"torch.compile does not work here: {type(error).__name__}")
        return None
    model.zero_grad()
    return Contender("torch.compile", model, lambda: _backward(compiled, inputs))


def _rows(inputs: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    return {key: value.chunk(size)[rank] for key, value in inputs.items()}


def _ddp(name: str) -> Contender:
    model, inputs = build(name)
    mine = _rows(inputs, dist.get_rank(), dist.get_world_size())
    wrapped = nn.parallel.DistributedDataParallel(model)
    return Contender("DDP", model, lambda: _backward(wrapped, mine))


def _layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: children of the first ModuleList of several."""
    return next(list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)


def _fsdp(name: str) -> Contender:
    model, inputs = build(name)
    mine = _rows(inputs, dist.get_rank(), dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contender("FSDP2", model, lambda: _backward(model, mine))


_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
_ROWS = ("o_proj", "down_proj", "fc2")


def _tensor(name: str, mesh: DeviceMesh, data: DeviceMesh | None = None) -> Contender:
    """Megatron's column and row parallel linears, as torch's tutorials have them."""
    model, inputs = build(name)
    plan: dict[str, ParallelStyle] = {}
    for path, _ in model.named_modules():
        leaf = path.rpartition(".")[2]
        if leaf in _COLUMNS:
            plan[path] = ColwiseParallel()
        elif leaf in _ROWS:
            plan[path] = RowwiseParallel()
        elif leaf == "embed_tokens":
            plan[path] = RowwiseParallel(input_layouts=Replicate())
        elif leaf == "lm_head":
            plan[path] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    if data is None:
        return Contender("TP", model, lambda: _backward(model, inputs))
    mine = _rows(inputs, data.get_local_rank(), data.size())
    for layer in _layers(model):
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return Contender("TP+FSDP2", model, lambda: _backward(model, mine))
