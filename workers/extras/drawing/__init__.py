"""Draws a schedule, planned or measured: as text for a terminal, as SVG for a page.

May import `schedule`. Read `sheet.py` first.
"""

from .svg import draw_svg
from .text import draw_text

__all__ = ["draw_svg", "draw_text"]
