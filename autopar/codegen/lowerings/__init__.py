"""Local forms of ops, one file per family. Importing this package registers them all."""

import importlib
import pkgutil

import autopar.core.ops  # noqa: F401  (registers the ops)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
