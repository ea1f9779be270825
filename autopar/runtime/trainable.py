"""Which parameters train is fixed in the traced step: what may change later, and what may not.

A parameter that is frozen later gets no gradient from then on, as on one device. One that was
frozen when the step was traced has no gradient in the program, so unfreezing it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.placement import Layout, Replicate
from autopar.errors import AutoparError
from autopar.runtime.state import to_dtensor

__all__ = ["check_still_frozen", "fill", "reserved_parameters"]


def reserved_parameters(model: nn.Module, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """Parameters without storage, by FQN, for optimizers made before the first batch."""
    whole: Layout = tuple(Replicate() for _ in range(mesh.ndim))
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        tensor = to_dtensor(empty, tuple(parameter.shape), whole, mesh)
        found[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    return found


def fill(reserved: nn.Parameter, parameter: nn.Parameter) -> None:
    """Turn a reserved parameter into the real one, which trains if the reserved one did.

    In place, so that an optimizer made before the first batch holds the real parameter.
    """
    trains = reserved.requires_grad
    torch.utils.swap_tensors(reserved, parameter)
    reserved.requires_grad_(trains)


def check_still_frozen(parameters: Mapping[str, Tensor]) -> None:
    """Stop a training step that would leave out the gradients of parameters that want some.

    Args:
        parameters: by FQN, those that were frozen when the step was traced.

    Raises:
        AutoparError: some of them are frozen no more.
    """
    unfrozen = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if unfrozen:
        more = f" and {len(unfrozen) - 3} more" if len(unfrozen) > 3 else ""
        raise AutoparError(
            f"{', '.join(unfrozen[:3])}{more} had requires_grad=False when the model was given to "
            "autopar.parallelize, so that the step computes no gradients of them, and require one "
            "now. Call autopar.parallelize again, on the model with them trainable: what is frozen "
            "after that may be unfrozen again."
        )
