"""The cases that `make test` leaves to `make test-slow`, beside those that are marked in the code.

    pytest --junitxml=durations.xml
    python -m tests.slow_cases durations.xml --least 0.5

lists in `slow_cases.txt` the cases that took long, but for the quickest one of each test, which
stands for the others, and the tests of one case that took longest of all. What is listed already
did not run, and stays; to begin anew, empty the file first. What the code marks is left out, as a
case that does not run in `make test` stands for none.
"""

from __future__ import annotations

import argparse
import math
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

LISTED = Path(__file__).with_suffix(".txt")

_CASE_S = 1.5  # beside a quicker case of the same test
_TEST_S = 15.0  # with no other case


def listed() -> set[str]:
    """Node ids of the cases that are listed."""
    return set(LISTED.read_text().splitlines())


def slow_cases(
    seconds: Iterable[tuple[str, float]], known: Iterable[str] = (), least_s: float = _CASE_S
) -> list[str]:
    """Node ids of those that are to be listed.

    Args:
        seconds: of the cases that ran.
        known: that are listed; those that did not run stay so.
        least_s: that a case takes, to be listed beside a quicker one.
    """
    took_s = dict.fromkeys(known, math.inf) | dict(seconds)
    tests = defaultdict[str, list[tuple[float, str]]](list)
    for case, took in took_s.items():
        tests[case.split("[")[0]].append((took, case))
    found: list[str] = []
    for cases in tests.values():
        (shortest_s, quickest), *others = sorted(cases)
        found += [case for took, case in others if took > least_s]
        found += [quickest] if not others and shortest_s > _TEST_S else []
    return sorted(found)


def _seconds(path: str) -> Iterable[tuple[str, float]]:
    for case in ElementTree.parse(path).iter("testcase"):
        module = case.attrib["classname"].replace(".", "/")
        yield f"{module}.py::{case.attrib['name']}", float(case.attrib["time"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("durations", help="what pytest's --junitxml wrote of all cases")
    parser.add_argument("--least", type=float, default=_CASE_S, help="seconds of a case")
    options = parser.parse_args()
    found = slow_cases(_seconds(options.durations), listed(), options.least)
    LISTED.write_text("\n".join(found) + "\n")
