"""Two ops that autopar does not know; what it needs for them is in the other modules."""

from autopar_example.ops import center, project

__all__ = ["center", "project"]
