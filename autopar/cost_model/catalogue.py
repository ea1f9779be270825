"""Profiles by name: those that come with autopar, those of other packages, and files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from autopar.core import extensions
from autopar.cost_model.profile import ClusterError, Profile

__all__ = ["load_profile", "profile_names", "register_profile"]

_GROUP = "autopar.profiles"
"""Entry points: the profile's name, and a package that has `<name>.toml` among its files."""

_OWN = resources.files("autopar.cost_model") / "profiles"
_REGISTERED: dict[str, Path] = {}


def register_profile(path: str | Path) -> str:
    """Make a TOML file known by its name, without the suffix.

    Returns:
        The name.

    Raises:
        ClusterError: no such file, or the name belongs to another profile.
    """
    file = Path(path).resolve()
    name = file.stem
    if file.suffix != ".toml" or not file.is_file():
        raise ClusterError(f"{path} is not a .toml file: pass the path of a profile")
    if _REGISTERED.get(name) != file and name in profile_names():
        raise ClusterError(f"there is a profile {name!r} already: give {path} another name")
    _REGISTERED[name] = file
    return name


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that come with autopar, then of those that were added to it."""
    own = {f.name.removesuffix(".toml") for f in _OWN.iterdir() if f.name.endswith(".toml")}
    added = {*(entry.name for entry in extensions.found(_GROUP)), *_REGISTERED}
    return (*sorted(own), *sorted(added - own))


def load_profile(name_or_path: str | Path) -> Profile:
    """Reads a profile.

    Args:
        name_or_path: one of `profile_names`, or the path of a TOML file of the same form.

    Returns:
        The profile.

    Raises:
        ClusterError: unknown name (lists the names), or a file that is not a profile.
    """
    names = profile_names()
    if str(name_or_path) in names:
        text = _text(str(name_or_path))
    elif Path(name_or_path).suffix == ".toml" and Path(name_or_path).is_file():
        text = Path(name_or_path).read_text(encoding="utf-8")
    else:
        raise ClusterError(_unknown_profile(str(name_or_path), names))
    try:
        return Profile.from_dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"profile {str(name_or_path)!r} is not valid TOML: {error}") from None


def _text(name: str) -> str:
    own = _OWN / f"{name}.toml"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    if name in _REGISTERED:
        return _REGISTERED[name].read_text(encoding="utf-8")
    entry = next(entry for entry in extensions.found(_GROUP) if entry.name == name)
    try:
        return (resources.files(entry.value) / f"{name}.toml").read_text(encoding="utf-8")
    except (OSError, ImportError, TypeError) as error:
        owner = entry.dist.name if entry.dist else "an unknown package"
        raise ClusterError(
            f"{owner} adds the profile {name!r}, but {entry.value} has no file {name}.toml that "
            f"can be read ({type(error).__name__}: {error}): name a package, and list the file in "
            "its package data"
        ) from error


def _unknown_profile(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"no profile {name!r}: it is neither a known name nor a .toml file.{hint} "
        f"Known: {', '.join(names)}."
    )
