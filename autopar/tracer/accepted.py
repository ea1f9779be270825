"""Which models can be parallelized: plain modules. Others are refused before they are traced."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.tracer.outside_tensors import refuse_shared_memory

__all__ = ["check_model"]

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
_SHARDED = "DTensor"


def check_model(model: object) -> None:
    """Every entry point asks this of a model first.

    Raises:
        TraceError: it is no `nn.Module`, is compiled to TorchScript, has parameters without a
            shape, or is parallel already by other means; names the module or parameter.
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else _described(model)
        raise TraceError(
            f"model is {given}, not a torch.nn.Module: pass an instance of one, such as "
            "MyModel(). A function becomes the forward of a module that holds its parameters."
        )
    for name, module in model.named_modules():
        where = f"module {name!r} is" if name else "the model is"
        _refuse_script(module, where)
        _refuse_parallel(module, name, where)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise TraceError(
                f"parameter {name} has no shape yet, as its module is lazy: call the model once, "
                "with a small batch, before autopar.parallelize."
            )
        if _is_a(parameter, _SHARDED):
            raise TraceError(
                f"parameter {name} of shape {tuple(parameter.shape)} is a DTensor: it is sharded "
                "already, as by fully_shard or parallelize_module. Pass the plain module; autopar "
                "shards it, and constraints={'zero': 3} as FSDP does."
            )
    refuse_shared_memory(model)


def _refuse_script(module: nn.Module, where: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TraceError(
            f"{where} a {type(module).__name__}, TorchScript that torch.jit.script or "
            "torch.jit.trace made: pass the Python module that it was made from."
        )


def _refuse_parallel(module: nn.Module, name: str, where: str) -> None:
    kind = next((kind for kind in _WRAPPERS if _is_a(module, kind)), None)
    if kind is not None:
        inner = f"model.{name}.module" if name else "model.module"
        raise TraceError(
            f"{where} wrapped in {kind}, which exchanges gradients by itself: unwrap it, pass "
            f"{inner} (or never wrap it); autopar splits the batch and the parameters."
        )
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        raise TraceError(
            f"{where} a SyncBatchNorm of {module.num_features} features: use nn.BatchNorm1d, 2d or "
            "3d (leave out convert_sync_batchnorm). The statistics of a BatchNorm in autopar are "
            "those of the whole batch, however it is split over ranks."
        )


def _is_a(value: Tensor | nn.Module, kind: str) -> bool:
    """True for a class of torch's by name, which loads none of its modules."""
    return any(
        base.__name__ == kind and base.__module__.startswith("torch.")
        for base in type(value).__mro__
    )


def _described(value: object) -> str:
    name = getattr(value, "__qualname__", "")
    return f"a {type(value).__name__}" + (f" ({name})" if name else "")
