"""What transformers' classes come to: exact, or refused for a reason in the model."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.hf_sweep import BOUND_FLOAT64, Outcome, check, in_turn, page_of, sweep
from tests.hf_tiny import classes

FAST = (
    "OPTForCausalLM",
    "GPTNeoXForCausalLM",
    "BloomForCausalLM",
    "DistilBertForSequenceClassification",
    "BeitForImageClassification",
    "SwinForImageClassification",
    "BartForConditionalGeneration",
)


def _say(outcome: Outcome) -> str:
    return f"{outcome.name}: {outcome.status}, {outcome.error:.1e}, {outcome.detail}"


@pytest.mark.parametrize("name", FAST)
def test_a_class_that_the_zoo_has_not(name: str) -> None:
    outcome = check(name, ("data",))
    assert outcome.status == "exact", _say(outcome)
    assert outcome.bound == BOUND_FLOAT64


def test_a_data_dependent_model_is_refused_with_its_line() -> None:
    outcome = check("FSMTForConditionalGeneration", ("data",))
    assert outcome.status == "refused", _say(outcome)
    assert "modeling_fsmt.py:" in outcome.detail
    assert "if not padding_mask.any()" in outcome.detail


def test_any_beginning_of_the_sweep_has_all_kinds() -> None:
    names = in_turn(classes())
    assert sorted(names) == sorted(classes())
    kinds = ("CausalLM", "SequenceClassification", "ImageClassification", "ConditionalGeneration")
    for kind in kinds:
        assert any(name.endswith("For" + kind) for name in names[:20])
    assert any("For" not in name for name in names[:20])


def test_the_page_counts_every_class_once() -> None:
    here = "/home/me/lib/python3.11/site-packages/transformers/x.py:7"
    page = page_of(
        [
            Outcome(name="OPTForCausalLM", status="exact", error=2e-15, bound=1e-9, plans=["data"]),
            Outcome(name="T5ForSequenceClassification", status="refused", detail=f"see {here}"),
        ]
    )
    assert "| `*ForCausalLM` | 1 | 0 | 0 |" in page
    assert f"| all | 1 | 1 | 0 | {len(classes()) - 2} | 0 |" in page
    assert "| OPTForCausalLM | data | 2.0e-15 | 1e-09 |" in page
    assert "| T5ForSequenceClassification | see transformers/x.py:7 |" in page


def test_a_cast_that_the_sweep_widens_is_traced() -> None:
    """The names of dtypes that torch leaves in an exported graph are those of the model's casts."""
    outcome = check("YosoForSequenceClassification", ("data",))
    assert outcome.status == "exact", _say(outcome)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_no_class_is_wrong(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = sweep(in_turn(classes()))
    (tmp_path / "models.md").write_text(page_of(outcomes))
    wrong = [o for o in outcomes if o.status == "wrong"]
    assert not wrong, "\n".join(_say(o) for o in wrong)
    seen = [o for o in outcomes if o.status in ("exact", "refused")]
    assert len(seen) >= 40
