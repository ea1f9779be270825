"""The summary of a plan, and plans as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.api import load_plan, plan
from autopar.core.considered import Considered
from autopar.core.placement import Partial, Replicate, Shard
from autopar.core.plan import PLAN_VERSION, CommBytes, NodePlan, Plan, Prediction, SolverReport
from autopar.core.timeline import PlannedMove, PlannedOp, Timeline
from autopar.cost_model import Cluster
from autopar.errors import PlanMismatchError
from autopar.report import format_bytes, format_seconds, parameter_rows, render_summary
from autopar.report.differences import render_differences
from autopar.report.summary import facts
from tests.zoo import MODELS

GIB = 2**30


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.from_profile("h100-sxm", devices_per_node=4)


@pytest.fixture(scope="module")
def gpt2(cluster: Cluster) -> Plan:
    model, inputs = MODELS["gpt2"]()
    pinned = {"data": 2, "tensor": "1d", "params": {"*wpe*": ["S0", "R"]}}
    return plan(model, cluster, inputs, constraints=pinned)


@pytest.fixture(scope="module")
def llama(cluster: Cluster) -> Plan:
    model, inputs = MODELS["llama"]()
    return plan(model, cluster, inputs, optimizer="sgd")


def made(parameters: dict[str, Any], **changes: Any) -> Plan:
    """A plan of given `{fqn: (shape, layout, mode)}` on a mesh dp=2 × tp=4; fp32."""
    sizes = {"parameters": 0}
    for shape, layout, _ in parameters.values():
        share = 4
        for size in shape:
            share *= size
        for placement, axis_size in zip(layout, (2, 4), strict=True):
            share //= axis_size if placement.is_shard else 1
        sizes["parameters"] += share
    fields: dict[str, Any] = {
        "fingerprint": "0123456789abcdef",
        "mesh_shape": (2, 4),
        "axis_names": ("dp", "tp"),
        "training": True,
        "nodes": {
            "mm": NodePlan(
                inputs=((Shard(0), Replicate()), (Replicate(), Shard(1, split=3))),
                outputs=((Shard(0), Partial()),),
                variants=("mm", "mm"),
            )
        },
        "parameters": {name: row[1] for name, row in parameters.items()},
        "shapes": {name: row[0] for name, row in parameters.items()},
        "dtypes": dict.fromkeys(parameters, "float32"),
        "inputs": {"input_ids": (Shard(0), Replicate()), "tangent_0": (Replicate(), Replicate())},
        "modes": {name: row[2] for name, row in parameters.items()},
        "cluster": Cluster.from_profile("h100-sxm", mesh_shape=(2, 4)).to_dict(),
        "predicted": Prediction(
            step_time_s=0.5,
            compute_time_s=0.375,
            comm_time_s=0.25,
            hidden_comm_s=(0.125, 0.0),
            peak_memory_bytes=3 * GIB,
            memory={**sizes, "activations": 2 * GIB},
            comm_bytes=(
                CommBytes(axis=0, kind="all_reduce", num_bytes=2048, count=3),
                CommBytes(axis=1, kind="all_gather", num_bytes=5 * GIB, count=7),
            ),
        ),
        "solver": SolverReport(
            objective=0.5,
            bound=0.5,
            gap=0.0,
            seconds=1.5,
            variables=10,
            constraints=20,
        ),
        "memory_limit_bytes": 4 * GIB,
    }
    return Plan(**{**fields, **changes})


COLUMN = (Replicate(), Shard(0))
ROW = (Replicate(), Shard(1))


def layers(num: int, mode: Callable[[int], str] = lambda i: "1D column") -> Plan:
    parameters: dict[str, Any] = {"embed.weight": ((64, 8), COLUMN, "sharded")}
    for i in range(num):
        parameters[f"model.layers.{i}.mlp.up.weight"] = ((16, 8), COLUMN, mode(i))
        parameters[f"model.layers.{i}.mlp.down.weight"] = ((8, 16), ROW, "1D row")
    parameters["head.weight"] = ((64, 8), COLUMN, "sharded")
    return made(parameters)


def names(found: Plan) -> list[str]:
    return [f"{r.block}|{r.name}" for r in parameter_rows(found)]


def test_equal_blocks_become_one() -> None:
    found = layers(100)
    assert names(found) == [
        "|embed.weight",
        "model.layers.[0-99]|mlp.up.weight",
        "model.layers.[0-99]|mlp.down.weight",
        "|head.weight",
    ]
    text = render_summary(found, 120)
    assert len(text.splitlines()) < 50
    (up,) = [line for line in text.splitlines() if "mlp.up.weight" in line]
    for part in ("[16, 8]", "Replicate(), Shard(0)", "1D column", "128 B"):
        assert part in up
    (block,) = [line for line in text.splitlines() if "model.layers.[0-99]" in line]
    assert "all 25.00 KiB" in block


def test_blocks_that_differ_stay_apart() -> None:
    found = layers(12, lambda i: "2D" if i in (3, 7) else "1D column")
    assert names(found) == [
        "|embed.weight",
        "model.layers.[0-2,4-6,8-11]|mlp.up.weight",
        "model.layers.[0-11]|mlp.down.weight",
        "model.layers.[3,7]|mlp.up.weight",
        "|head.weight",
    ]
    alternating = layers(12, lambda i: str(i % 2))
    assert "model.layers.[0-10:2]|mlp.up.weight" in names(alternating)
    assert "model.layers.[1-11:2]|mlp.up.weight" in names(alternating)


def test_nested_indices() -> None:
    def stages(depths: tuple[int, ...]) -> Plan:
        return made(
            {
                f"stages.{s}.layers.{i}.conv.weight": ((8, 8), COLUMN, "sharded")
                for s, depth in enumerate(depths)
                for i in range(depth)
            }
        )

    (row,) = parameter_rows(stages((3, 3)))
    assert (row.block, row.name, row.count) == ("stages.[0-1]", "layers.[0-2].conv.weight", 6)
    assert "(× 6)" in render_summary(stages((3, 3)), 120)
    assert names(stages((3, 4, 3))) == [
        "stages.[0,2]|layers.[0-2].conv.weight",
        "stages.1|layers.[0-3].conv.weight",
    ]
    assert names(made({"0.weight": ((8, 8), COLUMN, "")})) == ["0|weight"]
    assert "Parameters (0)" in render_summary(made({}))


def test_header_and_communication() -> None:
    text = render_summary(layers(2), 200)
    for part in (
        "dp=2 × tp=4 (8 devices)",
        "h100-sxm: H100 SXM5 80GB, 8 per node",
        "500 ms = compute 375 ms + exposed communication 125 ms (25.0%); 125 ms of communication",
        "3.00 GiB of 4.00 GiB (75.0%) per device: activations 2.00 GiB",
        "optimal: of the 500 ms that the search counts, no plan is below 500 ms (gap 0.00%)",
        "the last solve took 1.5 s, with 10 variables and 20 constraints after reduction",
        "5,368,709,120  5.00 GiB",
        "5,368,711,168",
        "adamw",
        "nothing",
        "\nCommunication of one device per step",
        "\nParameters (6)\n",
        "\nInputs\n",
    ):
        assert part in text, part
    assert "\x1b" not in text
    assert "input_ids" in text
    assert "tangent" not in text


def test_kernels_and_what_was_not_chosen_are_told() -> None:
    found = layers(3)
    rows = tuple(Considered(shape=f"{n} ranks", why=f"bound {n} s") for n in range(2, 12))
    found = replace(found, considered=rows, fusion=("rotary", "gated"))
    told = dict(facts(found))
    assert told["fused kernels"] == "gated, rotary"
    assert told["not chosen"].startswith("2 ranks: bound 2 s; 3 ranks")
    assert told["not chosen"].endswith("5 ranks: bound 5 s; and 6 less promising "
                                       "(`considered` in the file)")  # fmt: skip
    assert dict(facts(layers(3)))["fused kernels"] == "none"
    assert "not chosen" not in dict(facts(layers(3)))


def test_differences_have_signs_of_one_kind_and_what_ranks_wait() -> None:
    plan = layers(3)
    slow = replace(plan.predicted, step_time_s=2 * plan.predicted.step_time_s, bubble_s=1.5)
    other = replace(plan, predicted=slow, fusion=("gated",))
    text = render_differences(other, plan, 200)
    assert "(−50.00%)" in text and "(-" not in text
    (bubble,) = [line for line in text.splitlines() if "bubble" in line]
    assert "1.5 s" in bubble and "(−100.00%)" in bubble
    (kernels,) = [line for line in text.splitlines() if "fused kernels" in line]
    assert "gated" in kernels and "none" in kernels and "differs" in kernels
    assert "bubble" not in render_differences(plan, plan, 200)


def test_an_unproved_plan_is_labelled() -> None:
    found = layers(1)
    late = replace(found.solver, bound=0.25, gap=0.5)
    text = render_summary(replace(found, solver=late), 200)
    assert "bounded (not proved optimal)" in text
    assert "no plan is below 250 ms (gap 50.00%)" in text


def test_bytes_follow_each_dtype() -> None:
    found = layers(1)
    half = replace(found, dtypes=dict.fromkeys(found.dtypes, "bfloat16"))
    whole, halved = (sum(r.num_bytes * r.count for r in parameter_rows(p)) for p in (found, half))
    assert whole == 2 * halved > 0


def stepped(**changes: Any) -> Plan:
    """`layers(2)` with a timeline, and what rounding leaves of what is hidden."""
    moves = tuple(
        PlannedMove(axis, kind, num_bytes, times, 0.25 / 2 / times, "x", hidden_s)
        for axis, kind, num_bytes, times, hidden_s in (
            (0, "all_reduce", 2048, 3, 1.744e-16),
            (1, "all_gather", 5 * GIB, 7, 0.25 / 2 / 7 * (1 - 1e-10)),
        )
    )
    op = PlannedOp(
        name="mm",
        op="aten.mm.default",
        op_class="attention_backward_causal",
        phase="backward",
        module="",
        source="",
        operands=(),
        shapes=((8, 8),),
        dtype="float32",
        times=1,
        compute_s=0.375,
        moves=moves,
    )
    found = layers(2)
    timeline = Timeline(ops=(op,))
    return replace(found, predicted=replace(found.predicted, timeline=timeline), **changes)


@pytest.mark.parametrize("width", [40, 60, 80, 300])
def test_width(width: int) -> None:
    long = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "1f1b"}, "data": 2, "zero": 2}
    a, b = stepped(), stepped(constraints=long)
    b = replace(b, parameters={name: (Shard(0), Shard(1)) for name in b.parameters})
    summary, difference = render_summary(b, width), render_differences(a, b, width)
    for text in (summary, difference):
        assert max(map(len, text.splitlines())) <= width
        lines = [line.split() for line in text.splitlines()]
        starts = " ".join(cells[0] for cells in lines if cells)
        for label in ("all_gather", "step time", "activations", "model.layers.[0-1]"):
            assert width < 80 or label in text
        for label in ("dp", "tp") if width >= 60 else ():  # not squeezed to nothing
            (row,) = [cells for cells in lines if cells[:1] == [label] and len(cells) > 2]
            assert row[1] in ("all_reduce", "all_gather", "2", "4")
        for label in ("activati", "peak", "attention"):
            assert label in starts
    assert width < 60 or ("the same" in difference and "b against a" in difference)
    assert "…" not in summary + difference


def test_a_narrow_page_drops_what_is_told_twice() -> None:
    wide, narrow = (render_summary(stepped(), width) for width in (200, 80))
    assert "5,368,709,120" in wide and "5,368,709,120" not in narrow
    for text in (wide, narrow):
        row = next(line for line in text.splitlines() if "all_gather" in line)
        assert row.split()[0] == "tp" and "5.00 GiB" in row


def test_residues_are_nothing() -> None:
    text = render_summary(stepped(), 200)
    row = next(line for line in text.splitlines() if "all_reduce" in line)
    assert row.split()[-7:] == ["125", "ms", "0", "s", "125", "ms", "25.0%"]
    (row,) = [line for line in text.splitlines() if "all_gather" in line]
    assert row.split()[-7:] == ["125", "ms", "125", "ms", "0", "s", "0.0%"]
    assert "e-" not in text
    a = replace(stepped().predicted, hidden_comm_s=(1.744e-16, 0.0))
    b = replace(stepped().predicted, hidden_comm_s=(0.000174, 0.0))
    found = stepped()
    text = render_differences(replace(found, predicted=a), replace(found, predicted=b), 200)
    (row,) = [line for line in text.splitlines() if "hidden communication" in line]
    assert "+174 µs (new)" in row and "%" not in row


def test_precision_is_that_of_the_parameters() -> None:
    def precision(plan: Plan) -> str:
        rows = [line for line in render_summary(plan, 200).splitlines() if "precision" in line]
        return " ".join(rows[0].split()[1:])

    found = layers(1)
    half = replace(found, dtypes=dict.fromkeys(found.dtypes, "bfloat16"))
    assert precision(found) == "float32"
    assert precision(half) == "bfloat16"
    assert precision(replace(found, precision="bf16")) == "bf16 from parameters in float32"
    assert precision(replace(made({}), precision="fp32")) == "fp32"
    assert "optimizer  " in render_summary(found, 200).split("Memory")[0]
    without = render_summary(replace(found, training=False), 200)
    assert "optimizer" not in without.split("Memory")[0]


def test_names_are_shown_as_they_are() -> None:
    names = ("m.[bold red]rich[/].weight", "m.a b\nnew.weight", "m.[3x].weight", ":smile:.bias")
    text = render_summary(made(dict.fromkeys(names, ((8, 8), COLUMN, ""))), 200)
    for name in ("m.[bold red]rich[/].weight", "m.a b\\nnew.weight", "m.[3x].weight", ":smile:"):
        assert name in text
    assert "×" not in text.split("Parameters (4)")[1]


def test_units() -> None:
    assert [format_bytes(x) for x in (0, 1023, 1024, 1.5 * GIB, 2**62)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "4096.00 PiB",
    ]
    assert [format_seconds(x) for x in (0, 2.5e-6, 1.25e-3, 3.0)] == [
        "0 s",
        "2.5 µs",
        "1.25 ms",
        "3 s",
    ]
    small = [format_seconds(x) for x in (1.061e-11, 2e-16, -2.5e-3)]
    assert small == ["0.01061 ns", "0 s", "-2.5 ms"]


def test_summary_of_gpt2(gpt2: Plan) -> None:
    text = render_summary(gpt2, 200)
    assert "transformer.h." in text  # one row or two: near-ties between the first and last block
    for name in ("attn.c_attn.weight", "mlp.c_fc.bias", "transformer.wpe.weight", "labels"):
        assert name in text
    assert "data=2" in text
    assert "wpe" in render_summary(gpt2, 300).split("pinned")[1].splitlines()[0]
    assert sum(row.count for row in parameter_rows(gpt2)) == len(gpt2.parameters)
    for comm in gpt2.predicted.comm_bytes:
        assert f"{comm.num_bytes:,}" in text


def test_summary_of_llama(llama: Plan) -> None:
    text = render_summary(llama, 120)
    assert "device=4 (4 devices)" in text
    assert "model.layers." in text
    assert "self_attn.q_proj.weight" in text
    assert "sgd" in text
    assert "inv_freq" not in text
    assert "lifted_tensor" not in text


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_round_trip(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found: Plan = request.getfixturevalue(name)
    assert Plan.from_dict(found.to_dict()) == found
    found.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == found
    assert loaded.to_dict() == found.to_dict()
    assert loaded.summary() == found.summary()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    layers(1).save(path)
    text = path.read_text()
    for length in (0, 1, len(text) // 2, len(text) - 2):
        path.write_text(text[:length])
        with pytest.raises(PlanMismatchError, match=r"not a plan, or is cut short.*plan again"):
            load_plan(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanMismatchError):
        load_plan(path)
    path.write_text("[1]")
    with pytest.raises(PlanMismatchError, match="list"):
        load_plan(path)


@pytest.mark.parametrize("version", [PLAN_VERSION + 1, "1", None])
def test_other_version(version: object) -> None:
    with pytest.raises(PlanMismatchError, match="version"):
        Plan.from_dict({**layers(1).to_dict(), "version": version})


@pytest.mark.parametrize(
    "damage",
    [
        {"parameters": [1]},
        {"parameters": {"embed.weight": [["S0"], [4]]}},
        {"nodes": {"mm": 3}},
        {"parameters": {"embed.weight": [["S"], [4], "float32", None]}},
        {"predicted": {**layers(1).to_dict()["predicted"], "timeline": {"ops": [[1]]}}},
        {"predicted": {}},
        {"predicted": 1},
        {"solver": None},
        {"mesh_shape": "ab"},
        {"constraints": {"params": 1}},
        {"unknown": 1},
    ],
    ids=json.dumps,
)
def test_damaged_fields(damage: dict[str, Any]) -> None:
    with pytest.raises(PlanMismatchError, match="damaged"):
        Plan.from_dict({**layers(1).to_dict(), **damage})
