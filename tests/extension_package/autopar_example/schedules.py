"""All forwards, then the backwards from the last microbatch to the first."""

from __future__ import annotations

from autopar.extend import Action, pipeline_schedule


@pipeline_schedule("example-reversed")
def reversed_backwards(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    turns = range(microbatches)
    return [
        [Action("F", r, i) for i in turns] + [Action("B", r, i) for i in reversed(turns)]
        for r in range(ranks)
    ]
