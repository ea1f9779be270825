"""What constraints may be given as."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.core.constraints import NO_PIPELINE, Constraints, PipelinePin
from autopar.errors import ConstraintError


def test_a_number_is_a_size() -> None:
    assert Constraints.parse({"tensor": 2}).to_dict() == {"tensor": {"mode": "1d", "size": 2}}
    assert Constraints.parse({"pipeline": 2}).to_dict() == {"pipeline": {"size": 2}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor": [2]}, r"tensor=\[2\]: give settings, such as \{'mode'"),
        ({"tensor": 2.5}, "tensor=2.5: give settings"),
        ({"tensor": 0}, "tensor size=0 must be a positive whole number"),
        ({"sequence": 2}, "sequence=2: give settings"),
        ({"pipeline": [2]}, r"pipeline=\[2\]: give settings, such as \{'size'"),
    ],
)
def test_what_is_neither_settings_nor_one_of_them_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        Constraints.parse(given)


# fields of `Constraints`, the dict that says the same, and the words of both errors
WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"zero": 7}, {"zero": 7}, "zero=7: the stages are 0, 1, 2 and 3"),
    ({"zero": True}, {"zero": True}, "zero=True: the stages"),
    ({"zero": 2.0}, {"zero": 2.0}, "zero=2.0: the stages"),
    ({"data": 0}, {"data": 0}, "data=0 must be a positive whole number"),
    ({"data": "2"}, {"data": "2"}, "data='2' must be a positive whole number"),
    (
        {"tensor_mode": "foo"},
        {"tensor": "foo"},
        r"unknown tensor mode 'foo'; known are 1d, 2d, 2\.5d, 3d",
    ),
    (
        {"tensor_mode": "1d", "tensor_size": -1},
        {"tensor": {"size": -1}},
        "tensor size=-1 must be a positive",
    ),
    (
        {"tensor_mode": "2d", "depth": 2},
        {"tensor": {"mode": "2d", "depth": 2}},
        r"depth=2 belongs to mode 2\.5d, not 2d",
    ),
    (
        {"sequence": "rings"},
        {"sequence": "rings"},
        "unknown sequence mode 'rings'; known are megatron, ulysses, ring, none",
    ),
    (
        {"sequence": "ring", "sequence_size": 1.5},
        {"sequence": {"mode": "ring", "size": 1.5}},
        r"sequence size=1\.5 must be a positive",
    ),
    ({"offload": "all"}, {"offload": "all"}, "unknown offload 'all'; known are none, optimizer"),
    ({"checkpoint": "half"}, {"checkpoint": "half"}, "checkpoint='half': known are none"),
    ({"checkpoint": {"*": "half"}}, {"checkpoint": {"*": "half"}}, "is 'half': known are none"),
    ({"params": ["S0"]}, {"params": ["S0"]}, "give {FQN glob: placements}"),
    ({"params": {"*": 0}}, {"params": {"*": 0}}, r"params\['\*'\] = 0: give the placement"),
    ({"params": {0: "S0"}}, {"params": {0: "S0"}}, "params of 0: a parameter is named by its FQN"),
]


@pytest.mark.parametrize(("fields", "given", "words"), WRONG)
def test_fields_are_held_to_what_the_dict_is(
    fields: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConstraintError, match=words):
        Constraints(**fields)
    with pytest.raises(ConstraintError, match=words):
        Constraints.parse(given)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 0}, "pipeline size=0 must be a positive whole number"),
        ({"microbatches": True}, "pipeline microbatches=True must be a positive"),
        ({"schedule": "2f2b"}, "unknown pipeline schedule '2f2b'; known are .*1f1b"),
        ({"cuts": 3}, "pipeline cuts=3: give the FQN of the block"),
        ({"cuts": ["layers.1", 2]}, r"pipeline cuts=\['layers.1', 2\]: give the FQN"),
        ({"size": 2, "cuts": ["a", "b"]}, "cuts make 3 stages, size 2 × chunks 1 are 2"),
    ],
)
def test_pins_of_pipelines_are_held_to_what_the_dict_is(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConstraintError, match=words):
        PipelinePin(**settings)
    with pytest.raises(ConstraintError, match=words):
        Constraints.parse({"pipeline": settings})


@pytest.mark.parametrize("field", ["tensor_size", "depth", "sequence_size"])
def test_a_size_needs_the_mode_that_it_is_of(field: str) -> None:
    with pytest.raises(ConstraintError, match=f"{field.replace('_', ' ')}=2 pins nothing without"):
        Constraints(**{field: 2})
    with pytest.raises(ConstraintError, match="unknown sequence mode None"):
        Constraints.parse({"sequence": {"size": 2}})


def test_one_string_is_a_list_of_one() -> None:
    said = {"pipeline": {"cuts": ["model.layers.3"]}, "params": {"*": ["S0"]}}
    alone = {"pipeline": {"cuts": "model.layers.3"}, "params": {"*": "S0"}}
    assert Constraints.parse(alone).to_dict() == said
    assert Constraints(**alone).to_dict() == said  # type: ignore[arg-type]
    assert PipelinePin(cuts="layers.3").cuts == ("layers.3",)  # type: ignore[arg-type]
    assert Constraints(pipeline="none").pipeline == NO_PIPELINE  # type: ignore[arg-type]


def test_what_is_none_is_not_pinned() -> None:
    free = dict.fromkeys(("tensor", "sequence", "data", "zero", "pipeline", "params"))
    assert Constraints.parse(free) == Constraints()
    assert Constraints.parse({"tensor": {"mode": None, "size": 2}}).tensor_mode == "1d"


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ConstraintError, match=r"unknown tensor settings \['ways'\]; known: mode"):
        Constraints.parse({"tensor": {"mode": "1d", "ways": 2}})
    with pytest.raises(ConstraintError, match=r"unknown sequence settings \[3\]; known: mode"):
        Constraints.parse({"sequence": {"mode": "ring", 3: 2}})
