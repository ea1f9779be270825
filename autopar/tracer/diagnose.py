"""Turns a failed capture into a message with the user's own file and line and a remedy."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.errors import TraceError

__all__ = [
    "MODES",
    "NOWHERE",
    "SYMBOLIC",
    "asks_for_values",
    "explain_backward",
    "explain_failure",
    "innermost_line",
    "is_outside",
    "place_of",
    "refuse_data_dependent",
    "refuse_hooks",
    "refuse_mixed",
    "refuse_packed",
    "refuse_random",
    "refuse_sparse",
    "refuse_vmap",
    "refusing_tensor_hooks",
    "user_line",
]

_TORCH_DIR = str(Path(torch.__file__).parent)
_OWN_DIR = str(Path(__file__).parent.parent)
_PYTHON_DIR = sysconfig.get_path("stdlib")

_DATA_DEPENDENT = re.compile(
    r"data.?dependent|Could not guard|GuardOnDataDependent|_local_scalar_dense|"
    r"Could not extract specialized integer|aten\.nonzero|aten\.item|dynamic shape|"
    r"unhashable type: non-nested Sym",  # a number of a tensor, in a set or as a key
    re.IGNORECASE,
)


MODES = ("__torch_function__", "__torch_dispatch__")  # they pass on what another line calls
NOWHERE = "(no line outside torch)"
_REMEDY = (
    "The value of a tensor decides what runs or how large a result is, so there is no one "
    "graph to plan. Use torch.where or a mask there, or compute that part "
    "outside the model. A check that does no more than raise, `if tensor: raise`, may stay."
)
_DRAWN = (
    "Where it is the random number at {}, set the rate at which layers or paths are left out to 0, "
    "or multiply by a mask that is drawn for each sample."
)

_NO_BUFFER = (
    "The forward writes to a tensor that is not made in it and no buffer, such as one in a plain "
    "attribute, a list or a global variable. Make it a buffer of a module (register_buffer)."
)
_CONTROL_FLOW = (
    "How often torch.while_loop runs depends on values, so there is no one graph to plan. Write a "
    "Python loop of a fixed number of steps, whose later ones torch.where leaves without effect."
)

_ROWS = (
    "How many rows are picked depends on values, so there is no one graph to plan. Rows that a "
    "mask picks are planned up to a loss, a sum, a mean or `x[mask] = rows`, with what treats each "
    "row on its own before it. Else keep all rows "
    "and weight them: torch.where(mask[:, None], rows, 0), (losses * mask).sum() / mask.sum(), or "
    "ignore_index in a loss. A loop over experts gives each expert all tokens, as in\n"
    "    out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)\n"
    "  or sorts tokens by expert, chosen.flatten().argsort(), and multiplies the sorted rows with "
    "torch.nn.functional.grouped_mm, which computes only what is chosen."
)
_VMAP = (
    "torch.vmap hides the dim that it maps over, so gradients of its ops cannot be captured. Write "
    "them on the whole tensor: elementwise ops and nn.Linear take leading dims as they are, "
    "products are torch.einsum or torch.bmm, convolutions take groups."
)


def _user_frame(error: BaseException) -> str:
    """`file:line in function: source` of the innermost frame outside torch and autopar."""
    return innermost_line(traceback.extract_tb(error.__traceback__))


def innermost_line(frames: traceback.StackSummary) -> str:
    """`file:line in function: source` of the innermost frame outside torch and autopar."""
    for frame in reversed(frames):
        if is_outside(frame.filename) and frame.name not in MODES:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return NOWHERE


def is_outside(filename: str) -> bool:
    """True for a file of Python code that is not of torch, autopar or Python itself."""
    if filename.startswith((_TORCH_DIR, _OWN_DIR, "<")) or filename.endswith(".pyx"):
        return False  # a compiled one shows no line
    # installed packages may stand in a folder of Python's own
    return not filename.startswith(_PYTHON_DIR) or "-packages" in filename


_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<code>.*)'
)


def user_line(node: fx.Node) -> str:
    """`file:line in function: source` of the call that an exported node comes from."""
    for frame in reversed(list(_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if is_outside(frame["file"]) and frame["name"] not in MODES:
            return f"{frame['file']}:{frame['line']} in {frame['name']}: {frame['code']}"
    return NOWHERE


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


# what they give may look known where what reads it has told a size
_OF_VALUES = (
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
)


def refuse_data_dependent(
    model: nn.Module, gm: fx.GraphModule, lines: Mapping[str, str], stuck: Sequence[fx.Node] = ()
) -> None:
    """Refuse values and shapes that are known only when the graph runs.

    Args:
        stuck: ops that need to know how many rows a mask selects.

    Raises:
        TraceError: the exported graph has one; names the user's line.
    """
    parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
    for live in (_live(part.graph) for part in parts):
        for node in live:
            value = node.meta.get("val")
            values = value if isinstance(value, (tuple, list)) else (value,)
            given = (v for v in values if isinstance(v, (torch.Tensor, *SYMBOLIC)))
            found: list[tuple[Any, list[str]]]
            found = [(v, sorted(map(str, s))) for v in given if (s := free_unbacked_symbols(v))]
            if node.target in _OF_VALUES and not found:
                found = [(value, [])]
            if found:
                value, symbols = found[0]
                line = next((lines[s] for s in symbols if s in lines), user_line(node))
                what = f"{node.target} gives {_described(value)}"
                remedy = _ROWS if _picks_rows(node) else _REMEDY
                where = f"cannot trace {type(model).__name__} at {line}"
                behind = next((n for n in stuck if n is not node and n in live), None)
                if behind is not None:
                    what += f"; {_called(behind)} at {user_line(behind)} needs to know it"
                raise TraceError(f"{where}\n  {what}\n  {remedy}")


def _called(node: fx.Node) -> str:
    target = node.target
    overload = isinstance(target, torch._ops.OpOverload)
    return str(target) if overload else getattr(target, "__name__", str(target))


def _picks_rows(node: fx.Node) -> bool:
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return name in ("index", "masked_select", "nonzero", "nonzero_numpy", "where")


def refuse_vmap(exported: Any, lines: Mapping[str, str]) -> None:
    """Refuse a `vmap` over ops that depend on a parameter.

    Raises:
        TraceError: an op on the values of one element depends on one.
    """
    weighted = set(exported.graph_signature.inputs_to_parameters)
    mapped: set[str] = set()
    for node in exported.graph_module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        read = {operand.name for operand in node.all_input_nodes}
        if read & weighted and node.target is not torch.ops.aten.detach.default:
            weighted.add(node.name)
        if name == "_add_batch_dim" or (read & mapped and name != "_remove_batch_dim"):
            mapped.add(node.name)
        if node.name in mapped & weighted:
            raise TraceError(f"cannot trace {lines.get('vmap', NOWHERE)}\n  {_VMAP}")


_ONE_DTYPE = frozenset(
    "linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention convolution conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split()
)


def refuse_mixed(model: nn.Module, gm: fx.GraphModule, dtype: torch.dtype) -> None:
    """Refuse contractions of operands of two dtypes, which fake kernels let pass.

    Raises:
        TraceError: there is one.
    """
    for node in gm.graph.nodes:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if node.op != "call_function" or name not in _ONE_DTYPE:
            continue
        values = [operand.meta.get("val") for operand in node.all_input_nodes]
        dtypes = {
            str(v.dtype)[6:] for v in values if isinstance(v, torch.Tensor) if v.is_floating_point()
        }
        if len(dtypes) > 1:
            raise TraceError(
                f"cannot trace {type(model).__name__} in {str(dtype)[6:]} at {user_line(node)}\n"
                f"  {name} has operands of {' and '.join(sorted(dtypes))}\n"
                "  Parameters and floating inputs are cast, floating buffers and constants are "
                "not. Cast what meets them in the forward, as in `buffer.to(x.dtype)`."
            )


def refuse_packed(where: str) -> NoReturn:
    """Refuse a packed sequence that comes from outside.

    Raises:
        TraceError: always; names `where`.
    """
    raise TraceError(
        f"{where}\n  A packed sequence has as many rows as its lengths say, so each batch would "
        "need a graph of its own. Pass the padded batch and the lengths in, and call "
        "torch.nn.utils.rnn.pack_padded_sequence in the forward."
    )


def refuse_random(node: fx.Node, source: str, lines: Mapping[str, str]) -> None:
    """Refuse random numbers that ranks would not share.

    Raises:
        TraceError: a node of the joint graph draws such numbers.
    """
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        line = lines.get(name) or source or NOWHERE
        raise TraceError(
            f"cannot trace {line}\n  {node.target} draws random numbers that depend on who draws "
            "them. Draw with torch.rand, randn, randint, randperm, multinomial, bernoulli or "
            "dropout, without a generator, or pass the drawn numbers in as an input."
        )


def refuse_sparse(exported: Any, model: nn.Module) -> None:
    """Refuse sparse gradients.

    Raises:
        TraceError: an op of the exported program gives a trainable parameter one.
    """
    names = exported.graph_signature.inputs_to_parameters
    for node in exported.graph_module.graph.nodes:
        if not _has_sparse_gradient(node):
            continue
        table = node.args[0]
        # behind the name that the model has in a capture
        fqn = names.get(table.name, "").partition(".")[2]
        if fqn and not model.get_parameter(fqn).requires_grad:
            continue
        what = f"parameter {fqn}" if fqn else "a tensor computed from parameters"
        shape = tuple(table.meta["val"].shape)
        line = user_line(node)
        at = "" if line == NOWHERE else f" at {line}"
        raise TraceError(
            f"cannot trace {type(model).__name__}{at}\n"
            f"  {what} of shape {shape} gets a sparse gradient (sparse=True), which cannot be "
            "summed over ranks.\n  Leave out sparse=True: autopar splits a large table over ranks."
        )


def _has_sparse_gradient(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.embedding.default:
        return bool(node.kwargs.get("sparse", len(node.args) > 4 and node.args[4]))
    return node.target is torch.ops.aten.gather.default and bool(node.kwargs.get("sparse_grad"))


def refuse_hooks(model: nn.Module) -> None:
    """Refuse gradient hooks, which a compiled backward would not call.

    Raises:
        TraceError: the model has one.
    """
    remedy = (
        "A compiled backward calls no hooks. Remove it, use a torch.autograd.Function in the "
        "forward, or change the gradients of the parallel module after its backward."
    )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(f"parameter {name} has a gradient hook. {remedy}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            what = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise TraceError(f"module {what} has a backward hook. {remedy}")


@contextmanager
def refusing_tensor_hooks() -> Iterator[None]:
    """Gradient hooks that a forward puts on its activations are an error: export forgets them."""
    original = torch.Tensor.register_hook

    def refuse(tensor: torch.Tensor, hook: Any) -> Any:
        where = innermost_line(traceback.extract_stack())
        raise TraceError(
            f"{where}\n  a tensor of shape {tuple(tensor.shape)} gets a gradient hook. "
            "A compiled backward calls no hooks: use a torch.autograd.Function that changes the "
            "gradient instead."
        )

    torch.Tensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


def _live(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that an output, or something with an effect, needs; in order."""
    live: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.op == "output" or node.is_impure() or any(user in live for user in node.users):
            live[node] = None
    return list(reversed(live))


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, which depends on values"
    return f"the number {value}, which depends on values"


_NUMPY = (
    "NumPy and what is built on it see no values while a model is traced, and no gradients pass. "
    "Compute it with torch, or outside the model, and pass the result in as an input."
)


def explain_failure(model: nn.Module, error: BaseException, lines: Mapping[str, str]) -> str:
    """What failed, in which line of the user's code, and what to change."""
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    where = _user_frame(error)
    if "vmap" in lines and (where == NOWHERE or "vmap" in text or "atching rule" in text):
        return f"cannot trace {lines['vmap']}\n  {first}\n  {_VMAP}"
    if _DATA_DEPENDENT.search(text) or _DATA_DEPENDENT.search(type(error).__name__):
        remedy = _REMEDY
        if "drawn number" in lines:
            remedy += f"\n  {_DRAWN.format(lines['drawn number'])}"
    elif ".numpy() is not supported" in text:
        remedy = _NUMPY
    elif "is mutated in the forward" in text:
        remedy = _NO_BUFFER
    elif "higher order operator" in text:
        remedy = _CONTROL_FLOW
    else:
        remedy = "torch.export cannot capture this forward; its message is above in the chain."
    return f"cannot trace {type(model).__name__} at {where}\n  {first}\n  {remedy}"


def place_of(error: BaseException) -> str:
    """Where a capture failed: in which line, or as the first line of a refusal says."""
    if isinstance(error, TraceError):
        return str(error).partition("\n")[0]
    return _user_frame(error)


def asks_for_values(error: BaseException) -> bool:
    """True where a capture failed for want of the values of tensors."""
    text = str(error)
    if isinstance(error, TraceError):
        return _REMEDY in text or _ROWS in text
    return bool(_DATA_DEPENDENT.search(text) or _DATA_DEPENDENT.search(type(error).__name__))


def explain_backward(model: nn.Module, error: BaseException) -> str:
    """What failed in the derivative of a forward that could be captured."""
    text = str(error)
    if _DATA_DEPENDENT.search(text) or _DATA_DEPENDENT.search(type(error).__name__):
        remedy = f"The derivative of an op has a shape that depends on values. {_ROWS}"
    else:
        remedy = "Call backward on the loss of the plain model to see whether it has one."
    return f"cannot trace the backward of {type(model).__name__}\n  {text}\n  {remedy}"
