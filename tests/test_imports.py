"""A saved plan runs without the solver: what a package imports, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import autopar
from autopar import errors
from autopar.core.placement import Replicate, Shard
from autopar.core.plan import NodePlan, Plan, Prediction, SolverReport

SOLVER = ("pulp", "highspy", "autopar.solver")
RUNNERS = "import autopar.codegen.emit, autopar.codegen.lowerings, autopar.runtime.module"


def imported(code: str, *unwanted: str) -> list[str]:
    """Modules under `unwanted` that a fresh interpreter has after running `code`."""
    report = (
        f"{code}\nimport sys\nfor name in sorted(sys.modules):\n"
        f"    if any(name == u or name.startswith(u + '.') for u in {unwanted!r}): print(name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def tiny_plan() -> Plan:
    return Plan(
        fingerprint="none",
        mesh_shape=(2,),
        axis_names=("device",),
        training=True,
        nodes={"mm": NodePlan(inputs=((Shard(0),),), outputs=((Shard(0),),), variants=("",))},
        parameters={"weight": (Replicate(),)},
        shapes={"weight": (4, 4)},
        dtypes={"weight": "float32"},
        inputs={"x": (Shard(0),)},
        modes={"weight": "data"},
        cluster={},
        predicted=Prediction(
            step_time_s=1.0,
            compute_time_s=1.0,
            comm_time_s=0.0,
            peak_memory_bytes=1,
            memory={},
            comm_bytes=(),
        ),
        solver=SolverReport(
            objective=1.0,
            bound=1.0,
            gap=0.0,
            seconds=0.0,
            variables=0,
            constraints=0,
        ),
    )


def test_import_is_quick() -> None:
    assert imported("import autopar", "torch", "autopar.core", *SOLVER) == []


def test_load_plan_needs_no_solver(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = tiny_plan()
    plan.save(path)
    code = f"import autopar\n{RUNNERS}\nassert autopar.load_plan({str(path)!r}).mesh_shape == (2,)"
    assert imported(code, *SOLVER) == []
    assert Plan.load(path) == plan


def test_running_needs_no_planning_room() -> None:
    assert imported(RUNNERS, "autopar.tracer", "autopar.cost_model", *SOLVER) == []


def test_the_check_sees_the_solver() -> None:
    assert "autopar.solver.solve" in imported("import autopar.solver.solve", *SOLVER)


def test_kernels_are_known_without_triton() -> None:
    assert imported(f"{RUNNERS}\nimport autopar.kernels", "triton", "autopar.kernels.jit") == []
    assert "triton" in imported("import autopar.kernels.jit.norm", "triton")


def test_every_error_and_warning_that_users_meet_is_public() -> None:
    raised = [name for name in errors.__all__ if name != "AutoparError"]
    for name in (*raised, "ClusterError"):
        assert name in autopar.__all__ and issubclass(getattr(autopar, name), Exception)
