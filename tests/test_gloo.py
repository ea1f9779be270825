"""Training on real gloo processes through the public interface: the numbers of one process."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.pipeline import PipelinedStep
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks
from tests.traffic import Traffic, bytes_of

DATA_TENSOR_ZERO = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}


STEPS = 20
# one layer of Llama: most of the time goes into tracing, on every rank
BUILD = {"gpt2": zoo.gpt2, "llama": functools.partial(zoo.llama, layers=1), "vit": zoo.vit}


def train(
    rank: int, world: int, name: str, dropout: float, constraints: Any, limited: bool = False
) -> tuple[list[float], bool]:
    """Losses of AdamW steps with clipping, and whether any parameter is sharded.

    What a step sends is checked against the plan on the way.
    """
    torch.manual_seed(rank)  # ranks need not be seeded alike
    model, inputs = BUILD[name](dropout=dropout)
    parallel = autopar.parallelize(
        model.train(),
        init_device_mesh("cpu", (world,)),
        inputs,
        constraints=constraints,
        memory_limit=tight_limit(model) if limited else None,
        seed=3,
    )
    with traffic_on(parallel) as traffic:
        parallel.train_step(**inputs)
    assert_as_planned(traffic, parallel)
    parallel.zero_grad()
    losses = optimize(parallel, inputs)
    sharded = any(p.is_shard for layout in parallel.plan.parameters.values() for p in layout)
    return losses, sharded


def optimize(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[float]:
    """Losses of the training loop that a single-device script would have."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    losses = []
    for step in range(STEPS):
        if step % 2 and isinstance(model, autopar.ParallelModule):
            loss = model.train_step(**inputs)
        else:
            loss = model(**inputs).loss
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def tight_limit(model: torch.nn.Module) -> int:
    """60% of weights, gradients and AdamW's two moments: replication does not fit."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return int(0.6 * 4 * weights)


@functools.cache
def one_process(name: str, dropout: float) -> list[float]:
    ((losses, _),) = run_ranks(train, 1, 1, name, dropout, None)
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize("name", BUILD)
def test_one_process_equals_eager(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = BUILD[name]()
    expected = one_process(name, 0.0)
    assert optimize(model.train(), inputs) == pytest.approx(expected, rel=1e-5)
    # so that dropout is known to be on below
    assert one_process(name, 0.1) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("gpt2", None),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in BUILD if name != "gpt2"),
        *(pytest.param(name, DATA_TENSOR_ZERO, marks=pytest.mark.slow) for name in BUILD),
    ],
)
def test_twenty_steps_equal_one_process(name: str, constraints: Any) -> None:
    expected = one_process(name, 0.1)
    assert len(expected) == 20
    for losses, sharded in run_ranks(train, 4, 4, name, 0.1, constraints, constraints is None):
        assert sharded
        assert losses == pytest.approx(expected, rel=1e-5)


def parallel_mlp(rank: int, world: int, constraints: Any, **options: Any) -> Any:
    """The same module, inputs, and its parallel form, whose weights are rank 0's."""
    torch.manual_seed(rank)
    model = hw.Mlp()
    torch.manual_seed(0)
    reference = hw.Mlp()
    parallel = autopar.parallelize(
        model,
        init_device_mesh("cpu", (world,)),
        hw.vectors(),
        constraints=constraints,
        seed=3,
        **options,
    )
    return parallel, reference


def state_and_inference(rank: int) -> None:
    from torch.distributed.tensor import DTensor

    parallel, reference = parallel_mlp(rank, 4, DATA_TENSOR_ZERO)
    named = dict(parallel.named_parameters())
    assert list(named) == [n for n, _ in reference.named_parameters()]
    assert all(isinstance(p, DTensor) for p in named.values())
    for name, value in reference.state_dict().items():  # ranks were seeded differently
        assert torch.equal(named[name].full_tensor(), value), name

    batch = hw.vectors()
    reference.eval()
    parallel.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(**batch), reference(**batch))
        logits = parallel(x=batch["x"])  # without labels: another plan, the same storage
        torch.testing.assert_close(logits, reference(x=batch["x"]))
        assert all(p is named[n] for n, p in parallel.named_parameters())

    parallel.train()
    half = {k: v[:4] for k, v in batch.items()}
    for inputs in (batch, half, batch):  # a second batch shape
        reference.zero_grad()
        parallel.zero_grad()
        expected = reference(**inputs)
        expected.backward()
        torch.testing.assert_close(parallel.train_step(**inputs), expected.detach())
        for name, p in reference.named_parameters():
            torch.testing.assert_close(named[name].grad.full_tensor(), p.grad)


def test_state_inference_and_a_second_shape() -> None:
    run_ranks(state_and_inference, 4)


def own_loss(rank: int) -> None:
    import torch.nn.functional as F

    batch = hw.vectors()
    torch.manual_seed(0)
    reference = hw.Mlp()
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(
        hw.Mlp().requires_grad_() if rank else reference, mesh, constraints={"data": 2}
    )
    logits = parallel(x=batch["x"])  # planned at the first call
    assert logits.shape == (8, 8) and logits.requires_grad
    own = F.cross_entropy(logits, batch["labels"]) + logits.square().sum()
    own.backward()
    torch.manual_seed(0)
    single = hw.Mlp()
    out = single(x=batch["x"])
    (F.cross_entropy(out, batch["labels"]) + out.square().sum()).backward()
    for name, p in single.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad.full_tensor(), p.grad)
    with pytest.raises(autopar.AutoparError, match="loss_fn"):
        parallel.train_step(x=batch["x"])

    scored = autopar.parallelize(
        single, mesh, (batch["x"], batch["labels"]), constraints={"data": 2},
        loss_fn=F.cross_entropy,
    )  # fmt: skip
    single.zero_grad()
    expected = F.cross_entropy(single(batch["x"]), batch["labels"])
    expected.backward()
    loss = scored.train_step(batch["x"], batch["labels"])
    torch.testing.assert_close(loss, expected.detach())
    for name, p in single.named_parameters():
        torch.testing.assert_close(scored.get_parameter(name).grad.full_tensor(), p.grad)


def test_loss_outside_the_model() -> None:
    run_ranks(own_loss, 2)


def odd_parameters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for make, inputs in (
        (hw.Frozen, hw.vectors()),
        (hw.Unused, hw.vectors()),
        (hw.SharedWeight, hw.tokens()),
        (hw.SideOutputs, hw.vectors()),
    ):
        torch.manual_seed(rank)
        model = make()
        torch.manual_seed(0)
        reference = make()
        parallel = autopar.parallelize(model, mesh, inputs, constraints={"data": 2, "zero": 3})
        assert set(parallel.state_dict()) == set(reference.state_dict())
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
        single = torch.optim.AdamW(reference.parameters(), lr=0.1)
        for _ in range(2):
            parallel.train_step(**inputs)
            output = reference(**inputs)
            (output["loss"] if isinstance(output, dict) else output).backward()
            for name, p in reference.named_parameters():
                grad = parallel.get_parameter(name).grad
                assert (grad is None) == (p.grad is None), name
                assert parallel.get_parameter(name).requires_grad == p.requires_grad
                if p.grad is not None:
                    torch.testing.assert_close(grad.full_tensor(), p.grad)
            for each in (optimizer, single):
                each.step()
                each.zero_grad()
        full = {k: getattr(v, "full_tensor", lambda v=v: v)()
                for k, v in parallel.state_dict().items()}  # fmt: skip
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(full[name], value)
    output = parallel(**inputs)
    expected = reference(**inputs)
    assert set(output) == set(expected) and output["scale"] == 2.0
    torch.testing.assert_close(whole(output["logits"]), expected["logits"])
    assert torch.equal(whole(output["chosen"]), expected["chosen"])


def whole(value: Any) -> torch.Tensor:
    """The global value of a tensor or DTensor."""
    result = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert isinstance(result, torch.Tensor)
    return result


def test_frozen_unused_tied_and_side_outputs() -> None:
    run_ranks(odd_parameters, 2)


def batch_norm(rank: int) -> None:
    torch.manual_seed(rank)
    model, inputs = zoo.resnet()
    torch.manual_seed(0)
    reference, _ = zoo.resnet()
    reference.train()
    parallel = autopar.parallelize(
        model.train(), init_device_mesh("cpu", (2,)), inputs, constraints={"data": 2}
    )
    assert set(parallel.state_dict()) == set(reference.state_dict())
    for _ in range(2):
        with traffic_on(parallel) as traffic:
            loss = parallel.train_step(**inputs)
        assert traffic.total() == parallel.compiled.program.comm_bytes() != ()
        torch.testing.assert_close(loss, reference(**inputs).loss.detach())
    expected = dict(reference.named_buffers())
    assert any("running_var" in name for name in expected)
    for name, value in parallel.named_buffers():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    reference.eval()
    parallel.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            whole(parallel(**inputs).logits), reference(**inputs).logits, rtol=1e-4, atol=1e-5
        )


def test_batch_norm_in_training_and_evaluation() -> None:
    run_ranks(batch_norm, 2)


def traffic_on(parallel: autopar.ParallelModule) -> Traffic:
    """A counter for the process groups of the module's mesh."""
    step = parallel.first_step
    mesh = step.mesh.stage if isinstance(step, PipelinedStep) else parallel.mesh
    axes = {mesh.get_group(axis).group_name: axis for axis in range(mesh.ndim)}
    return Traffic(axes, parallel.plan.mesh_shape)


def assert_as_planned(traffic: Traffic, parallel: autopar.ParallelModule) -> None:
    """What a rank sent is what its plan, or the plans of its pipeline stages, predict."""
    step = parallel.first_step
    if not isinstance(step, PipelinedStep):
        assert bytes_of(traffic.total()) == bytes_of(parallel.plan.predicted.comm_bytes)
        return
    expected: Counter[tuple[int, str]] = Counter()
    for stage in step.programs:
        expected.update(bytes_of(step.pipeline.stages[stage].predicted.comm_bytes))
    assert bytes_of(traffic.total()) == expected
    sends = sum(
        step.pipeline.microbatches if t.phase in ("forward", "backward") else 1
        for t in step.transfers
        if t.source in step.programs and t.target % step.pipeline.size != step.mesh.rank
    )
    assert len(traffic.sent) == sends


def bytes_of_a_run(rank: int, constraints: Any) -> tuple[Any, Any]:
    """What a training step sends, and what the plan predicts."""
    parallel, _ = parallel_mlp(rank, 4, constraints)
    with traffic_on(parallel) as traffic:
        parallel.train_step(**hw.vectors())
    return bytes_of(traffic.total()), bytes_of(parallel.plan.predicted.comm_bytes)


@pytest.mark.parametrize(
    "constraints", [DATA_TENSOR_ZERO, {"tensor": {"mode": "2d", "size": 4}}], ids=["zero", "2d"]
)
def test_bytes_of_a_run_are_the_predicted_ones(constraints: Any) -> None:
    for seen, predicted in run_ranks(bytes_of_a_run, 4, constraints):
        assert seen and seen == predicted


class Rows(torch.utils.data.Dataset):
    """Remembers which rows were read."""

    def __init__(self) -> None:
        self.batch = hw.vectors(24 * 16, 64)
        self.read: list[int] = []

    def __len__(self) -> int:
        return 24 * 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {k: v[index] for k, v in self.batch.items()}


def sharded_loading(rank: int) -> list[int]:
    from torch.utils.data import DataLoader

    parallel = autopar.parallelize(
        hw.Mlp(64),
        init_device_mesh("cpu", (2,)),
        hw.vectors(128, 64),
        constraints={"data": 2},
    )

    def loader(rows: Rows) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(7)
        return DataLoader(rows, batch_size=8 * 16, shuffle=True, generator=order)

    rows = Rows()
    local = [
        parallel.train_step(**batch).item() for batch in parallel.shard_dataloader(loader(rows))
    ]
    expected = [parallel.train_step(**batch).item() for batch in loader(Rows())]
    assert len(local) == 3 and local == pytest.approx(expected, rel=1e-6)
    torch.manual_seed(rank)  # without a generator, ranks still share one order
    plain = DataLoader(Rows(), batch_size=8 * 16, shuffle=True)
    seen = [b["x"].full_tensor() for b in parallel.shard_dataloader(plain)]
    assert torch.cat(seen).sum() == pytest.approx(float(Rows().batch["x"].sum()), abs=1e-2)
    assert torch.cat(seen).unique(dim=0).shape[0] == 24 * 16
    parallel.eval()
    with torch.no_grad():  # a share of the training plan, in a step with another plan
        batches = parallel.shard_dataloader(loader(Rows()))
        shares = [whole(parallel(x=batch["x"])) for batch in batches]
        outputs = [whole(parallel(x=batch["x"])) for batch in loader(Rows())]
    for share, output in zip(shares, outputs, strict=True):
        torch.testing.assert_close(share, output)
    return rows.read


def test_each_rank_reads_its_rows_only() -> None:
    reads = run_ranks(sharded_loading, 2)
    assert sorted(reads[0] + reads[1]) == list(range(24 * 16))
    assert len(reads[0]) == 12 * 16


class Texts(torch.utils.data.Dataset):
    """Token sequences; remembers which were read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 128, (24, 16), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trained_on_shares(rank: int, constraints: Any, shares: bool) -> tuple[list[float], list[int]]:
    """Losses of two shuffled epochs with dropout, and the samples that this rank read."""
    from torch.utils.data import DataLoader

    torch.manual_seed(rank)
    model, inputs = zoo.gpt2(dropout=0.1, layers=1)
    parallel = autopar.parallelize(
        model.train(), init_device_mesh("cpu", (4,)), inputs, constraints=constraints, seed=3
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=5e-3)
    texts = Texts()
    order = torch.Generator().manual_seed(7)
    loader = DataLoader(texts, batch_size=4, shuffle=True, generator=order)
    batches = parallel.shard_dataloader(loader) if shares else loader
    losses = []
    for _ in range(2):
        for batch in batches:
            losses.append(parallel.train_step(**batch).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, texts.read


@pytest.mark.parametrize(
    ("constraints", "axis"),
    [
        pytest.param({"data": 4, "zero": 0}, [0, 1, 2, 3], id="data"),
        pytest.param(DATA_TENSOR_ZERO, [0, 0, 1, 1], id="zero", marks=pytest.mark.slow),
    ],
)
def test_training_on_shares_equals_training_on_global_batches(
    constraints: Any, axis: list[int]
) -> None:
    whole_runs = run_ranks(trained_on_shares, 4, constraints, False)
    runs = run_ranks(trained_on_shares, 4, constraints, True)
    every = whole_runs[0][1]
    assert len(every) == 48 and sorted(every) == sorted([*range(24)] * 2)
    parts = max(axis) + 1
    for (losses, read), (expected, _), part in zip(runs, whole_runs, axis, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6) and len(set(losses)) == 12
        rows = 4 // parts  # of each batch of 4, those of this rank's part
        batches = [every[start : start + 4] for start in range(0, 48, 4)]
        assert read == [i for b in batches for i in b[part * rows : (part + 1) * rows]]
