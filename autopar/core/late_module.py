"""A graph module whose code is generated when it is first needed.

While a plan is made, many programs are emitted only to be simulated, and never run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.core.direct_calls import with_direct_calls

__all__ = ["LateModule", "late_module"]


class LateModule(fx.GraphModule):
    """As `fx.GraphModule`, which writes and compiles its code at once."""

    def recompile(self) -> Any:
        """Note that the code is to be written anew."""
        self._is_late = True
        own = type(self)  # torch gives each graph module a class of its own
        if "forward" in vars(own) and own is not LateModule:
            del own.forward

    def _write(self) -> None:
        if self._is_late:
            self._is_late = False
            shown, self._graph = self._graph, with_direct_calls(self._graph)
            super().recompile()  # gives this module's own class its `forward`
            self._graph = shown

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Write the code and run it; from then on it runs without this."""
        self._write()
        return type(self).forward(self, *args, **kwargs)

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        self._write()
        return super().code


def late_module(graph: fx.Graph) -> LateModule:
    """A module of a graph that reads no attributes."""
    return LateModule(torch.nn.Module(), graph)
