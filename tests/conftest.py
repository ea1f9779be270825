"""Plans that tests make are cached in a folder of their own; Triton runs in its interpreter.

Cases in `slow_cases.txt` are marked as slow.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.slow_cases import LISTED, listed
from tests.triton_interpreter import needs_interpreter

needs_interpreter()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("AUTOPAR_CACHE_DIR")
    os.environ["AUTOPAR_CACHE_DIR"] = str(tmp_path_factory.mktemp("plans"))
    yield
    if before is None:
        del os.environ["AUTOPAR_CACHE_DIR"]
    else:
        os.environ["AUTOPAR_CACHE_DIR"] = before


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that are listed as slow, before any are deselected."""
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    whole = {item.nodeid.split("::")[0] for item in items} if "::" not in str(config.args) else ()
    gone = slow - {item.nodeid for item in items}
    if gone := sorted(case for case in gone if case.split("::")[0] in whole):
        raise pytest.UsageError(f"{LISTED.name} has cases that there are not: {', '.join(gone)}")


def pytest_collection_finish() -> None:
    """Fewer collections: what imports made stays, and so does most of a test's to its end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
