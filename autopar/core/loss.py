"""Which output of a traced step is the loss; where there is none, why, for an error message."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from autopar.core.graph import OutputSpec, TracedModel, output_paths
from autopar.errors import AutoparError

__all__ = ["check_has_loss", "missing_loss", "position_of_loss"]

_HOW = "Return it from the forward (labels passed to the model), or pass loss_fn= to parallelize."


def position_of_loss(traced: TracedModel) -> int:
    """The index of the loss among the user outputs.

    Raises:
        AutoparError: there is none, or one of several scalars that none of them is named.
    """
    if traced.loss_index is None:
        raise AutoparError(f"train_step needs one scalar loss: {missing_loss(traced)}")
    return traced.loss_index


def check_has_loss(traced: TracedModel) -> None:
    """Refuse a training step in microbatches that has no loss, and would return None alone.

    Raises:
        AutoparError: says why there is none.
    """
    if traced.training and traced.loss_index is None:
        raise AutoparError(
            f"a training step of a pipeline needs one scalar loss: {missing_loss(traced)} For the "
            "outputs alone, call the module in evaluation mode or under torch.no_grad()."
        )


def missing_loss(traced: TracedModel) -> str:
    """Why a traced step has no loss, and what to change."""
    if not traced.training:
        return (
            "this step was captured without gradients, in evaluation mode or under "
            "torch.no_grad(). Call .train(), and train_step outside of no_grad."
        )
    parameters = tuple(traced.parameters())
    if not parameters:
        return "the module has no parameters, so there is nothing to train. Call it as it is."
    if not any(spec.trainable for spec in parameters):
        return (
            f"all {len(parameters)} parameters are frozen: none requires a gradient "
            f"({parameters[0].target} is the first). Call requires_grad_(True) on those to train, "
            "before parallelize."
        )
    results = tuple(spec for spec in traced.outputs if spec.kind == "output")
    scalars = [spec for spec in results if _is_scalar(_value(traced, spec))]
    trained = [spec for spec in scalars if _is_trained(traced, spec)]
    if len(trained) > 1:
        names = ", ".join(_path(traced, spec) for spec in trained)
        return (
            f"the model returns {len(trained)} scalars: {names}. Return the one to train in a "
            "field `loss`, or pass loss_fn= to parallelize, which gets the output and "
            "returns it."
        )
    if scalars:
        return _untrained(traced, (trained or scalars)[0])
    return _no_scalar(traced, results)


def _untrained(traced: TracedModel, spec: OutputSpec) -> str:
    """Why no gradient comes from a scalar."""
    value, name = _value(traced, spec), f"{_named(traced, spec)}, a scalar,"
    assert value is not None
    if not value.is_floating_point():
        return (
            f"{name} has dtype {_dtype(value)}, and only a floating one has a gradient. A count, "
            "such as of correct answers, has none: train a loss, such as cross_entropy."
        )
    if _reads_trainable(traced, spec):
        return (
            f"{name} is detached from the parameters that it is computed from: by .detach(), "
            ".data, torch.no_grad(), or an op without a gradient such as argmax or a comparison. "
            "Take that out of the way from the parameters to the loss."
        )
    trainable = [p.target for p in traced.parameters() if p.trainable]
    return (
        f"{name} does not depend on a parameter that requires a gradient "
        f"({len(trainable)} do, {trainable[0]} the first). Compute it from the model's output."
    )


def _no_scalar(traced: TracedModel, results: tuple[OutputSpec, ...]) -> str:
    """What there is among the outputs in place of a scalar tensor."""
    for spec in results:
        if int(spec.target) in traced.numbers or isinstance(spec.constant, (int, float)):
            return (
                f"{_path(traced, spec)} is a Python number, which has no gradient, as .item(), "
                "float() or tolist() make it. Return the tensor."
            )
    tensors = [(spec, value) for spec in results if (value := _value(traced, spec)) is not None]
    if not tensors:
        return f"the forward (or loss_fn) returns {'None' if results else 'nothing'}. {_HOW}"
    shapes = ", ".join(f"{_named(traced, s)} has shape {list(v.shape)}" for s, v in tensors[:3])
    more = f" and {len(tensors) - 3} more follow" if len(tensors) > 3 else ""
    return (
        f"{shapes}{more}. If that is a loss of each element (reduction='none'), take its mean() or "
        f"sum(), or reduction='mean' or 'sum'. If it is no loss: {_HOW[0].lower()}{_HOW[1:]}"
    )


def _path(traced: TracedModel, spec: OutputSpec) -> str:
    return f"output{output_paths(traced.out_spec)[int(spec.target)]}"


def _named(traced: TracedModel, spec: OutputSpec) -> str:
    """The output's path, with the user's line that computes it where that is known."""
    source = next((line for n in _ancestors(traced, spec) if (line := _line(traced, n))), "")
    return _path(traced, spec) + (f" ({source})" if source else "")


def _line(traced: TracedModel, node: fx.Node) -> str:
    return traced.info[node.name].source if node.name in traced.info else ""


def _value(traced: TracedModel, spec: OutputSpec) -> Tensor | None:
    node = traced.nodes()[spec.node] if spec.node else None
    value = None if node is None else node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _is_scalar(value: Tensor | None) -> bool:
    return value is not None and not value.dim()


def _is_trained(traced: TracedModel, spec: OutputSpec) -> bool:
    """A floating scalar that trainable parameters go into."""
    value = _value(traced, spec)
    return value is not None and value.is_floating_point() and _reads_trainable(traced, spec)


def _reads_trainable(traced: TracedModel, spec: OutputSpec) -> bool:
    trainable = {p.node for p in traced.parameters() if p.trainable}
    return any(node.name in trainable for node in _ancestors(traced, spec))


def _ancestors(traced: TracedModel, spec: OutputSpec) -> Iterator[fx.Node]:
    """The node of an output, then all that it is computed from, the nearest first."""
    if spec.node is None:
        return
    queue = [traced.nodes()[spec.node]]
    seen = set(queue)
    for node in queue:
        yield node
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        queue += new


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
