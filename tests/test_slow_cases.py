"""Which cases are left to `make test-slow`."""

from __future__ import annotations

from pathlib import Path

from tests.slow_cases import listed, slow_cases


def test_the_quickest_case_of_each_test_stays() -> None:
    seconds = [
        *(("a.py::one[x]", 9.0), ("a.py::one[y]", 4.0), ("a.py::one[z]", 2.0)),
        *(("a.py::two[x]", 5.0), ("a.py::three", 14.0), ("b.py::three", 31.0)),
        *(("b.py::two[x]", 32.0), ("b.py::two[y]", 31.0)),
    ]
    assert slow_cases(seconds) == ["a.py::one[x]", "a.py::one[y]", "b.py::three", "b.py::two[x]"]


def test_cases_of_less_than_is_asked_for_stay() -> None:
    seconds = [("a.py::one[x]", 2.0), ("a.py::one[y]", 0.4), ("a.py::one[z]", 0.7)]
    assert slow_cases(seconds) == ["a.py::one[x]"]
    assert slow_cases(seconds, least_s=0.5) == ["a.py::one[x]", "a.py::one[z]"]


def test_what_is_listed_and_did_not_run_stays() -> None:
    known = ["a.py::one[x]", "a.py::one[y]", "b.py::two"]
    seconds = [("a.py::one[z]", 30.0), ("c.py::one[x]", 9.0), ("c.py::one[y]", 8.0)]
    assert slow_cases(seconds, known) == [*known, "c.py::one[x]"]
    seconds.append(("a.py::one[x]", 1.0))
    assert slow_cases(seconds, known) == [
        "a.py::one[y]",
        "a.py::one[z]",
        "b.py::two",
        "c.py::one[x]",
    ]


def test_cases_of_all_listed_files_are_there() -> None:
    """Those of a file that is collected are checked as that is done (`conftest.py`)."""
    root = Path(__file__).parent.parent
    assert listed()
    assert all((root / case.split("::")[0]).is_file() for case in listed())
