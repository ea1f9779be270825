"""The paper's memory headline: what 2D lets 16 GB devices hold (Bian et al. 2021, 2110.14883).

3 billion parameters at batch 16 on 4 devices and 12 billion on 16, in fp16 with AdamW, by 2D tensor
parallelism alone: no ZeRO, no offload.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from autopar.core.constraints import Constraints
from autopar.cost_model import Cluster
from autopar.solver.solve import solve
from autopar.tracer.trace import trace


@pytest.mark.slow
@pytest.mark.parametrize(
    ("billions", "width", "heads", "side"), [(3, 2496, 26, 2), (12, 4992, 52, 4)], ids=["3", "12"]
)
def test_the_models_of_the_paper_fit(billions: int, width: int, heads: int, side: int) -> None:
    config = hf.GPT2Config(n_layer=40, n_embd=width, n_head=heads, n_positions=1024)
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(config).half()
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters >= billions * 10**9
    ids = torch.zeros(16, 1024, dtype=torch.long, device="meta")
    traced = trace(model.train(), {"input_ids": ids, "labels": ids}, fold=True)
    devices = side**2
    cluster = Cluster.from_profile(
        "p100", nodes=devices // 4, devices_per_node=4, mesh_shape=(side, side)
    )
    limit = 16 * 10**9
    wanted = Constraints.parse({"tensor": {"mode": "2d", "size": devices}, "offload": "none"})
    plan = solve(traced, cluster, constraints=wanted, memory_limit=limit)
    assert plan.predicted.peak_memory_bytes <= limit and plan.offload == "none"
    assert plan.mesh_shape == (side, side) and plan.pipeline is None
    assert any("2D" in mode for mode in plan.modes.values())
    # 2D alone spreads weights and both moments over all devices, but for the odd vocabulary
    held = plan.predicted.memory["parameters"] + plan.predicted.memory["optimizer"]
    assert held <= 1.2 * 3 * 2 * parameters / devices
