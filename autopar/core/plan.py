"""`Plan`: what was decided for a model on a mesh, as frozen, versioned data (JSON)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.core.block_kinds import Checkpoint, read_checkpoint
from autopar.core.calls import BucketBytes, CommBytes, Pieces
from autopar.core.considered import Considered
from autopar.core.constraints import Constraints
from autopar.core.excerpt import Excerpt, excerpts_from, excerpts_to
from autopar.core.flights import ALONE, Waits, checked_orders
from autopar.core.graph import Repeat
from autopar.core.held import Held
from autopar.core.placement import Layout, parse_placement
from autopar.core.prediction import Prediction, SolverReport
from autopar.core.schedule import Orders, actions, orders_of
from autopar.core.timeline import PipelineSlot, Timeline
from autopar.errors import PlanMismatchError

__all__ = [
    "PLAN_VERSION",
    "BucketBytes",
    "CommBytes",
    "NodePlan",
    "Pieces",
    "PipelinePlan",
    "Plan",
    "Prediction",
    "SolverReport",
]

PLAN_VERSION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """How one op runs: layouts of its operands and outputs, lowering variant per mesh axis."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    variants: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """A step in microbatches, over one or more pipeline ranks.

    Attributes:
        size: number of pipeline ranks; pipeline rank r has the r-th of `size` equal runs of the
            world's ranks.
        chunks: stages of each pipeline rank; stage s is on pipeline rank s modulo `size`.
        microbatches: microbatches of a step.
        schedule: one of `core.schedule.schedules()`.
        cuts: FQN of the block that each stage but the first begins with.
        time: how each op of the whole step is split over the microbatches, as layouts of one axis.
        stages: the plan of each stage, on the mesh of a pipeline rank.
        bubble: share of the step in which ranks stand idle, as simulated.
        slots: what each rank does when, in order of start.
        peaks: predicted peak memory of each rank, all its stages together.
        orders: for "automatic", kinds of action by rank (`core.schedule.kinds_of`).
    """

    size: int
    chunks: int
    microbatches: int
    schedule: str
    cuts: tuple[str, ...]
    time: Mapping[str, NodePlan]
    stages: tuple[Plan, ...]
    bubble: float = 0.0
    slots: tuple[PipelineSlot, ...] = ()
    peaks: tuple[int, ...] = ()
    orders: tuple[str, ...] = ()

    def actions(self) -> Orders:
        """The order of each rank's work."""
        if self.orders:
            return orders_of(self.orders)
        return actions(self.schedule, self.size, self.microbatches, self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run a model on a mesh: placements of every tensor, and what that is predicted to cost.

    Attributes:
        fingerprint: hash of the traced graph that the plan is for.
        mesh_shape, axis_names: the mesh that layouts refer to; in a pipeline, of one pipeline rank.
        training: True for a training step, False for inference.
        nodes: how each op runs, by name of its graph node.
        parameters: storage layout by FQN (parameter, gradient, optimizer state).
        shapes, dtypes: global shape and dtype name of each parameter.
        inputs: layout of each user input.
        modes: name of the parallel form of each weight, by FQN.
        cluster: the hardware that it was priced for (`Cluster.to_dict`).
        predicted: seconds and bytes that the cost model expects.
        solver: how the plan was found, and how far from the optimum it can be.
        constraints: what the user pinned.
        memory_limit_bytes: per device, what the plan had to fit.
        optimizer: name of the optimizer whose states count as memory, with the options that add
            some: ``"sgd(momentum)"``.
        checkpoint: recomputation of activations, "none", "selective", "full" or "host" of all
            blocks, or of each run: `{"model.layers.0-10": "full", "model.layers.11-31": "none"}`.
        offload: what stays in host memory between updates: "none" or "optimizer".
        repeats: blocks of `nodes` that stand for others (`parameters` names all of them).
        nested: as of `TracedModel`: lists of blocks inside of numbered modules.
        precision: of compute, "fp32", "bf16" or "fp16"; `dtypes` are those of the masters.
        pipeline: microbatches and stages, where there are any; `nodes` is empty then, and
            `predicted` is of the rank that takes longest.
        reduce_dtype: dtype in which gradients are summed over ranks, "fp32", "bf16" or "fp16"; None
            where the solver chose it.
        buckets: how large buckets of collectives get.
        considered: the most promising pipelines that were not chosen.
        pieces: collectives that are cut into pieces, or may be one call with their matmuls
            (`codegen/passes/decompose.py`, `symmetric.py`).
        fusion: names of the fused kernels that ops were priced as part of.
        excerpts: what a rank runs for one block of each kind; of a pipeline, of all its stages.
    """

    fingerprint: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    training: bool
    nodes: Mapping[str, NodePlan]
    parameters: Mapping[str, Layout]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    inputs: Mapping[str, Layout]
    modes: Mapping[str, str]
    cluster: Mapping[str, Any]
    predicted: Prediction
    solver: SolverReport
    constraints: Mapping[str, Any] = field(default_factory=dict)
    memory_limit_bytes: int = 0
    optimizer: str = "adamw"
    checkpoint: Checkpoint = "none"
    offload: str = "none"
    repeats: tuple[Repeat, ...] = ()
    nested: tuple[str, ...] = ()
    precision: str = "fp32"
    pipeline: PipelinePlan | None = None
    reduce_dtype: str | None = None
    buckets: tuple[BucketBytes, ...] = ()
    considered: tuple[Considered, ...] = ()
    pieces: tuple[Pieces, ...] = ()
    fusion: tuple[str, ...] = ()
    excerpts: tuple[Excerpt, ...] = ()
    version: int = PLAN_VERSION

    @property
    def num_devices(self) -> int:
        """Devices of all pipeline ranks."""
        ranks = self.pipeline.size if self.pipeline is not None else 1
        return math.prod(self.mesh_shape) * ranks

    def bucket_sizes(self) -> dict[tuple[int, str], int]:
        """Bytes that close a bucket, by mesh axis and kind."""
        return {(row.axis, row.kind): row.num_bytes for row in self.buckets}

    def piece_counts(self) -> dict[tuple[str, int, str], int]:
        """Pieces of the collectives that are cut, by node, mesh axis and kind."""
        return {(row.node, row.axis, row.kind): row.count for row in self.pieces}

    def symmetric_calls(self) -> frozenset[tuple[str, int, str]]:
        """Collectives that may be one call with their products, by node, mesh axis and kind."""
        return frozenset((row.node, row.axis, row.kind) for row in self.pieces if row.call)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; layouts as lists of short forms such as `"S0"`.

        What is known of a parameter is one row under its name: layout, shape, dtype, mode.
        """
        bare = replace(self.predicted, timeline=Timeline(), held=None)
        plain = asdict(
            replace(
                self,
                predicted=bare,
                nodes={},
                parameters={},
                inputs={},
                pipeline=None,
                excerpts=(),
            )
        )
        plain["solver"] = {"status": self.solver.status, **plain["solver"]}
        plain["excerpts"] = excerpts_to(self.excerpts)
        plain["predicted"]["timeline"] = self.predicted.timeline.to_dict()
        if self.predicted.held is not None:
            plain["predicted"]["held"] = self.predicted.held.to_dict()
        plain["nodes"] = _rows(self.nodes)
        if self.pipeline is not None:
            plain["pipeline"] = asdict(replace(self.pipeline, time={}, stages=()))
            plain["pipeline"]["time"] = _rows(self.pipeline.time)
            plain["pipeline"]["stages"] = [stage.to_dict() for stage in self.pipeline.stages]
        plain["parameters"] = {
            name: [_layout(x), list(self.shapes[name]), self.dtypes[name], self.modes.get(name)]
            for name, x in self.parameters.items()
        }
        for key in ("shapes", "dtypes", "modes"):
            del plain[key]
        plain["inputs"] = {name: _layout(x) for name, x in self.inputs.items()}
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanMismatchError: another version, or fields are missing.
        """
        version = data.get("version")
        if version != PLAN_VERSION:
            raise PlanMismatchError(
                f"the plan has version {version!r}, this autopar reads version {PLAN_VERSION}; "
                "plan again"
            )
        try:
            return cls(**_fields(data))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise PlanMismatchError(
                f"the plan is damaged ({type(error).__name__}: {error}); plan again"
            ) from error

    def digest(self) -> str:
        """Hash of what ranks must have in common: all but how the plan and its stages were solved.

        Ranks that each solve for themselves find the same plan, but take different times to do so.
        """
        same = self.to_dict()
        stages = same["pipeline"]["stages"] if same["pipeline"] is not None else []
        for each in (same, *stages):
            del each["solver"]
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        target = Path(path)
        scratch = target.with_name(target.name + ".part")
        scratch.write_text(_text(self.to_dict()))
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan.

        Raises:
            PlanMismatchError: not a plan, truncated, or of another version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanMismatchError(
                f"{path} is not a plan, or is cut short ({error}); plan again"
            ) from error
        if not isinstance(data, dict):
            raise PlanMismatchError(f"{path} holds no plan but a {type(data).__name__}")
        return cls.from_dict(data)

    def summary(self) -> str:
        """Terminal tables: totals, time and bytes, placements by block and parameter."""
        from autopar.report import render_summary

        return render_summary(self)

    def to_trace(self, path: str | Path, ranks: int | None = None) -> int:
        """Write the predicted step as a Chrome trace, one process per rank.

        Args:
            path: file; compressed where the name ends in `.gz`.
            ranks: how many of the first ranks to write. The plan expects the same of all, or of
                all that have the same stages; by default all are written, or as many (of each
                stage) as make a file that a browser can open.

        Returns:
            The number of ranks written.

        Raises:
            PlanMismatchError: the plan has no timeline.
        """
        from autopar.core.trace_events import write_predicted

        if not self.predicted.timeline.ops:
            raise PlanMismatchError("the plan has no timeline; plan again")
        return write_predicted(self, path, ranks)


def _text(data: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of a section: short, and plans can be compared by line."""

    def section(value: Any) -> str:
        if isinstance(value, dict) and value:
            lines = (f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
            return "{\n" + ",\n".join(lines) + "\n}"
        return json.dumps(value)

    return "{\n" + ",\n".join(f"{json.dumps(k)}: {section(v)}" for k, v in data.items()) + "\n}\n"


def _rows(nodes: Mapping[str, NodePlan]) -> dict[str, Any]:
    return {
        name: [
            [_layout(x) for x in node.inputs],
            [_layout(x) for x in node.outputs],
            list(node.variants),
        ]
        for name, node in nodes.items()
    }


def _nodes(rows: Mapping[str, Any]) -> dict[str, NodePlan]:
    return {
        name: NodePlan(
            inputs=tuple(_parse(x) for x in row[0]),
            outputs=tuple(_parse(x) for x in row[1]),
            variants=tuple(row[2]),
        )
        for name, row in rows.items()
    }


def _layout(layout: Layout) -> list[str]:
    return [p.short for p in layout]


def _parse(layout: Any) -> Layout:
    return tuple(parse_placement(text) for text in layout)


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(data)
    fields["mesh_shape"] = tuple(int(x) for x in data["mesh_shape"])
    fields["axis_names"] = tuple(data["axis_names"])
    rows = data["parameters"]
    fields["parameters"] = {name: _parse(row[0]) for name, row in rows.items()}
    fields["shapes"] = {name: tuple(int(n) for n in row[1]) for name, row in rows.items()}
    fields["dtypes"] = {name: row[2] for name, row in rows.items()}
    fields["modes"] = {name: row[3] for name, row in rows.items() if row[3] is not None}
    fields["nodes"] = _nodes(data["nodes"])
    fields["checkpoint"] = read_checkpoint(data.get("checkpoint", "none"))
    if data.get("pipeline") is not None:
        pipeline = dict(data["pipeline"])
        pipeline["cuts"] = tuple(pipeline["cuts"])
        pipeline["time"] = _nodes(pipeline["time"])
        pipeline["slots"] = tuple(PipelineSlot(*row) for row in pipeline.get("slots", ()))
        pipeline["peaks"] = tuple(pipeline.get("peaks", ()))
        kinds = pipeline.get("orders", ())
        turns = (pipeline["size"], pipeline["microbatches"])
        pipeline["orders"] = checked_orders(kinds, *turns) if kinds else ()
        pipeline["stages"] = tuple(Plan.from_dict(stage) for stage in pipeline["stages"])
        fields["pipeline"] = PipelinePlan(**pipeline)
    fields["inputs"] = {name: _parse(x) for name, x in data["inputs"].items()}
    predicted = dict(data["predicted"])
    predicted["comm_bytes"] = tuple(CommBytes(**row) for row in predicted["comm_bytes"])
    predicted["timeline"] = Timeline.from_dict(predicted["timeline"])
    predicted["hidden_comm_s"] = tuple(predicted["hidden_comm_s"])
    if predicted.get("held") is not None:
        predicted["held"] = Held.from_dict(predicted["held"])
    fields["predicted"] = Prediction(**predicted)
    waits = Waits.of(data["solver"].get("waits", ALONE))
    solver = {k: v for k, v in data["solver"].items() if k != "status"}  # it follows from the gap
    fields["solver"] = SolverReport(**solver | {"waits": waits})
    fields["buckets"] = tuple(BucketBytes(**row) for row in data.get("buckets", ()))
    fields["pieces"] = tuple(Pieces(**row) for row in data.get("pieces", ()))
    fields["considered"] = tuple(Considered(**row) for row in data.get("considered", ()))
    fields["fusion"] = tuple(data.get("fusion", ()))
    fields["excerpts"] = excerpts_from(data.get("excerpts", {}))
    fields["repeats"] = tuple(Repeat(**row) for row in data.get("repeats", ()))
    fields["nested"] = tuple(data.get("nested", ()))
    fields["constraints"] = Constraints.parse(data.get("constraints")).to_dict()
    return fields
