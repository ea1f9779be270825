"""The public names: all resolve, no module takes their place, and what pages speak of is there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import iter_modules, resolve_name

import pytest
import torch

import autopar
import autopar.codegen.lowerings  # registers the ops
from autopar import extend

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
EXTENSION = tomllib.loads((ROOT / "tests/extension_package/pyproject.toml").read_text("utf-8"))
GROUPS = {group.removeprefix("autopar.") for group in EXTENSION["project"]["entry-points"]}
# one of a host's, a path's or a longer name's parts is none of ours
NAME = re.compile(r"(?<![\w./])autopar\.([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)*)(\()?")


def test_every_public_name_resolves_and_is_listed() -> None:
    assert len(set(autopar.__all__)) == len(autopar.__all__)
    assert set(autopar.__all__) <= set(dir(autopar))
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = autopar.paralelize


def test_what_extensions_use_is_listed() -> None:
    assert set(extend.__all__) <= set(dir(extend))
    for name in extend.__all__:
        assert getattr(autopar.extend, name) is not None


def test_no_module_has_the_name_of_what_is_public() -> None:
    """Its import would put the module in the place of the function."""
    modules = {module.name for module in iter_modules(autopar.__path__)} - {"extend"}
    assert not modules & set(autopar.__all__)


def test_a_fresh_interpreter_has_what_it_did_not_import() -> None:
    code = (
        "import autopar, autopar.cli.commands\n"
        "assert callable(autopar.explain) and callable(autopar.frontier)\n"
        "assert callable(autopar.extend.register_profile)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_speak_of_names_that_exist(page: Path) -> None:
    for match in NAME.finditer(page.read_text("utf-8")):
        first, rest, call = match.groups()
        if first in autopar.__all__:
            value = getattr(autopar, first)
            for name in rest.split(".")[1:]:
                value = getattr(value, name)
            assert not call or callable(value), match.group()
        elif first not in GROUPS and not hasattr(torch.ops.autopar, first):
            assert not call, f"{match.group()}…) is not public"
            assert resolve_name(f"autopar.{first}{rest}") is not None
