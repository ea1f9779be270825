"""What constraints may be given as."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.core.constraints import Constraints
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
