"""A few random programs under one plan each; `python -m tests.program_sweep` runs more."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.program_sweep import Runs, outcome, settings
from tests.program_text import write


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_programs_equal_eager(seed: int) -> None:
    program = write(seed)
    runs = Runs(program)
    exact = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for setting in itertools.islice(settings(seed, program.source()), 6):
            if len(setting.mesh) == 1:
                kind, text = outcome(runs, setting)
                assert kind in ("exact", "refused"), f"{setting}: {text}\n{program.source()}"
                exact += kind == "exact"
    assert exact


def test_a_program_is_the_same_each_time() -> None:
    first, second = write(7), write(7)
    assert first.source() == second.source()
    assert all(torch.equal(a, b) for a, b in zip(
        first.build().parameters(), second.build().parameters(), strict=True
    ))  # fmt: skip


def test_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime import lockstep

    right = lockstep._run_group

    def slightly_wrong(target: object, args: object) -> list[torch.Tensor]:
        return [x * (1 + 1e-6) if x.is_floating_point() else x for x in right(target, args)]

    monkeypatch.setattr(lockstep, "_run_group", slightly_wrong)
    program = write(1)
    runs = Runs(program)
    found = [outcome(runs, s)[0] for s in itertools.islice(settings(1, program.source()), 4)]
    assert "wrong" in found
