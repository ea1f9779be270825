"""Plans for people: terminal tables (`summary`, `differences`, `explained`) and a page (`page`)."""

from __future__ import annotations

from autopar.core.units import format_bytes, format_seconds
from autopar.report.parameters import ParameterRow, parameter_rows
from autopar.report.summary import render_summary
from autopar.report.tables import plain_table, render

__all__ = [
    "ParameterRow",
    "format_bytes",
    "format_seconds",
    "parameter_rows",
    "plain_table",
    "render",
    "render_summary",
]
