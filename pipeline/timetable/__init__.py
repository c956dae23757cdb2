"""Draws a schedule, planned or measured: as text for a terminal, as SVG for a page."""

from .svg import svg
from .text import text

__all__ = ["svg", "text"]
