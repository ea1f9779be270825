"""Squares as products: `pow(x, 2)` becomes `x x`."""

from __future__ import annotations

import torch
from torch import fx

from autopar.extend import PassContext, program_pass

aten = torch.ops.aten


@program_pass("example-squares")
def squares(graph: fx.Graph, context: PassContext) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        if node.args[1] == 2:
            with graph.inserting_before(node):
                product = graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
            node.replace_all_uses_with(product)
            graph.erase_node(node)
