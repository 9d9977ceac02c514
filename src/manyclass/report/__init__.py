"""Runs compared: a table for the terminal, a plot, and one HTML page."""

from .compare import plot, table, write
from .runs import Run, load

__all__ = ["Run", "load", "plot", "table", "write"]
