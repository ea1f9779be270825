"""Private names of torch, for torch 2.11 to 2.13: here, in `_dtensors` and in `_tracing` alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._C import _functorch
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory
from torch._functorch import predispatch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.autograd import forward_ad
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    Store,
    _get_default_store,
    _get_process_group_store,
)
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import has_side_effect
from torch.library import Library
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges

from autopar._forms import filled, form_of

__all__ = [
    "asks_emptiness",
    "cloned_store",
    "default_store",
    "fake_empty",
    "fake_mode_of",
    "fake_view",
    "floor_divided",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "group_of",
    "has_symmetric_memory",
    "in_function_transform",
    "inductor_compile",
    "keep_between",
    "lazily_compiled",
    "leaving_transforms",
    "meet_in_symmetric_memory",
    "module_has_hooks",
    "register_dataclasses",
    "storage_users",
    "symbolic_mode",
    "upper_bound",
    "with_autograd",
    "without_onednn",
]

_MEETING = timedelta(seconds=60)


def _gather_one_by_one() -> Library:
    """Let `_c10d_functional.all_gather_into_tensor` of CPU tensors go gloo's plain way.

    The op takes gloo's `allgather_coalesced`, which corrupts the heap where several are in flight
    (pytorch/pytorch#65231 saw it in gloo's own tests). Its out variant does not.
    """

    def gather(tensor: Tensor, group_size: int, group_name: str) -> Tensor:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        out = real.new_empty((real.shape[0] * group_size, *real.shape[1:]))
        functional = torch.ops._c10d_functional
        functional.all_gather_into_tensor_out(real, group_size, group_name, out=out)
        return torch.view_as_complex(out) if tensor.is_complex() else out

    library = Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, "CPU")
    return library


_gathers = _gather_one_by_one()  # kernels live as long as their library


for _nesting in (predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting):
    has_side_effect(_nesting)  # the ops of a captured `vmap` mean nothing without them


def storage_users(tensor: Tensor) -> int:
    """How many tensors show the storage of one, itself included."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # of which `storage` is one


def fake_empty(
    mode: FakeTensorMode,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """A fake tensor with a storage of its own, without an op that makes it."""
    with in_kernel_invocation_manager(mode):
        inside = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, inside, device)


def fake_view(
    mode: FakeTensorMode, shown: FakeTensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> FakeTensor:
    """A fake tensor that shows the storage of another one, without an op that makes it."""
    storage = shown.untyped_storage()
    with in_kernel_invocation_manager(mode):
        inside = torch.empty(0, dtype=shown.dtype, device="meta")
        inside.set_(storage, offset, size, stride)
    return FakeTensor(mode, inside, shown.fake_device)


def default_store() -> Store:
    """The key-value store that the ranks of the default process group met at."""
    return _get_default_store()


def cloned_store(store: Store) -> Store:
    """The same store over a connection of its own."""
    found: Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    return found


# --- symmetric memory, which needs no registration of groups in these versions


def group_of(name: str) -> Any:
    """The process group that a program calls by this name."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def has_symmetric_memory(device: torch.device) -> bool:
    """True if torch can allocate symmetric memory on a device."""
    return _SymmetricMemory.get_backend(device) is not None


def meet_in_symmetric_memory(group: Any) -> None:
    """Map a small buffer of every rank of a group; raises where that fails.

    Ranks meet at the group's store. One that fails leaves the others waiting there, for no longer
    than `_MEETING` then, in place of the minutes that a store has. The fused ops take for granted
    that a device that can multicast does, where torch goes on without when it fails to.
    """
    store = _get_process_group_store(group)
    patience = store.timeout  # type: ignore[attr-defined]  # not in torch's stubs
    store.set_timeout(_MEETING)
    try:
        met = symmetric.get_symm_mem_workspace(group.group_name, min_size=1 << 20)
    finally:
        store.set_timeout(patience)
    device = torch.cuda.current_device()
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device) and not met.multicast_ptr:
        raise RuntimeError(
            "multicast failed on devices that have it; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
        )


def fused_all_gather_matmul(
    shard: Tensor, others: list[Tensor], group_name: str, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Torch's op on matrices, whose rows are gathered."""
    # small ones are gathered by multicast, unless they are wanted: it takes multiples of 16 bytes
    wanted = keep or shard.numel() * shard.element_size() % 16 > 0
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
        shard, others, 0, group_name, return_A=wanted
    )
    return whole, products


def fused_matmul_reduce_scatter(a: Tensor, b: Tensor, group_name: str) -> Tensor:
    """Torch's op on matrices, the rows of whose product are summed and scattered."""
    found: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group_name)
    return found


def fake_mode_of(values: Sequence[Tensor]) -> Any:
    """The mode that fake tensors belong to."""
    return detect_fake_mode(values)


def symbolic_mode() -> FakeTensorMode:
    """A mode for fake inputs of Inductor beside integers that are to stay symbols."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def module_has_hooks(module: nn.Module) -> bool:
    """True if calling a module runs more than its forward."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(own) or bool(_has_any_global_hook())


def inductor_compile(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """`module` through Inductor, for inputs like these; it takes a list and empties it."""
    from torch._dynamo.utils import GmWrapper

    boxed: Any = GmWrapper(module, list)  # so the compiled function takes its arguments in a list
    found: Callable[[list[Any]], Sequence[Any]] = torch._inductor.compile(boxed, list(inputs))
    return found


def in_function_transform() -> bool:
    """True inside of `torch.func.grad`, `vmap` and their like."""
    return torch._C._functorch.maybe_current_level() is not None


def register_dataclasses(value: Any) -> None:
    """Let torch see the tensors in dataclasses that a batch or an output is made of.

    Those of a `BlockMask`, too: of its blocks, and around the function that it is a mask of.
    """
    if flex := sys.modules.get("torch.nn.attention.flex_attention"):
        leaves = pytree.tree_leaves(value)
        for kind in {type(x) for x in leaves if isinstance(x, flex.BlockMask)}:
            pytree.register_pytree_node(
                kind, _mask_parts, _mask_of_parts, flatten_with_keys_fn=_mask_parts_by_place
            )
    found = {type(x) for x in pytree.tree_leaves(value) if _holds_tensors(x)}
    for kind in found:
        pytree.register_dataclass(kind)
    if found:
        register_dataclasses(value)  # those inside of these


def _mask_parts(mask: Any) -> tuple[list[Tensor], Any]:
    tensors: list[Tensor] = []
    return tensors, (type(mask), form_of(vars(mask), tensors))


def _mask_parts_by_place(mask: Any) -> tuple[list[tuple[Any, Tensor]], Any]:
    tensors, context = _mask_parts(mask)
    return [(pytree.SequenceKey(i), x) for i, x in enumerate(tensors)], context


def _mask_of_parts(tensors: Iterable[Tensor], context: Any) -> Any:
    kind, form = context
    mask = kind.__new__(kind)
    vars(mask).update(filled(form, iter(tensors)))
    return mask


def _holds_tensors(value: Any) -> bool:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    fields = dataclasses.fields(value)
    inside = pytree.tree_leaves([getattr(value, field.name) for field in fields])
    made = all(field.init for field in fields)  # else it could not be made again
    return made and any(isinstance(x, Tensor) or _holds_tensors(x) for x in inside)


def upper_bound(number: Any) -> Any:
    """The largest that a number which depends on values can be."""
    return number.node.shape_env.bound_sympy(number.node.expr).upper


def keep_between(number: Any, low: float, high: float) -> None:
    """Let comparisons of a number that depends on values know its bounds."""
    for symbol in number.node.expr.free_symbols:
        bounds = ValueRanges(sympy.Float(low), sympy.Float(high))
        number.node.shape_env.var_to_range[symbol] = bounds


def floor_divided(size: Any, divisor: int) -> Any:
    """What a shape says where a dim that depends on values is divided."""
    return FloorDiv(size, divisor)


def asks_emptiness(answer: Any) -> bool | None:
    """Of `n == 0` False and of `n != 0` True, for a number of rows n; else None."""
    asked = answer.node.expr
    if isinstance(asked, (sympy.Eq, sympy.Ne)) and asked.rhs == 0:
        sizes = all(s in answer.node.shape_env.size_like for s in asked.lhs.free_symbols)
        return isinstance(asked, sympy.Ne) if sizes else None
    return None


@contextmanager
def without_onednn() -> Iterator[None]:
    """Let ATen call no op of oneDNN's own, such as its LSTM.

    `torch.backends.mkldnn.flags` does more: it warns, and fixes a precision that was a default.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Lets a kernel take derivatives: autograd calls kernels with itself switched off."""
    keys = torch._C.DispatchKey
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@contextmanager
def lazily_compiled() -> Iterator[None]:
    """Python code of a graph module is written when it is called, and most never are."""
    with _use_lazy_graph_module(True):
        yield


# torch 2.11 has one call for this, which pops each level twice
_LEAVE = {
    _functorch.TransformType.Vmap: _functorch._vmap_decrement_nesting,
    _functorch.TransformType.Grad: _functorch._grad_decrement_nesting,
    _functorch.TransformType.Jvp: _functorch._jvp_decrement_nesting,
    _functorch.TransformType.Functionalize: _functorch._func_decrement_nesting,
}


@contextmanager
def leaving_transforms() -> Iterator[None]:
    """What fails inside a transform of `torch.func` leaves none of its levels behind."""
    depth, level = _functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    enabled, inside = torch._C._is_fwd_grad_enabled(), _in_dual_level()
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > depth:
            _LEAVE[_functorch.peek_interpreter_stack().key()]()
        if not inside and _in_dual_level():
            torch._C._exit_dual_level(level=0)
        forward_ad._current_level = level
        torch._C._set_fwd_grad_enabled(enabled)
        raise


def _in_dual_level() -> bool:
    """True inside a level of forward-mode differentiation, of which torch allows one."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False
