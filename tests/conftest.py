"""Plans that tests make are cached in a folder of their own; Triton runs in its interpreter."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

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


def pytest_collection_finish() -> None:
    """Fewer collections: what imports made stays, and so does most of a test's to its end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
