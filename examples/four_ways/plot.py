"""Draws loss curves that lie on each other: the first widest, each later one thinner on top of it."""

from collections.abc import Mapping

Curve = Mapping[int, float]  # a loss by the number of its step

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 52, 24, 40, 46
LOW, HIGH = 0.2, 0.8
WIDE = (9.0, 6.0, 3.5, 1.3)  # of the curves, in order
NOTEBOOK = {"d": {0: 0.706, 10_000: 0.293}, "t": {0: 0.693, 10_000: 0.285}}  # data-parallel and tensor-parallel
STYLE = """
  svg { font: 12px system-ui, sans-serif; background: #fff; }
  text { fill: #24292f; } .grid { stroke: #d8dee4; } polyline { fill: none; stroke-linejoin: round; }
  .c0 { stroke: #c8d1da; } .c1 { stroke: #54aeff; } .c2 { stroke: #d4a72c; } .c3 { stroke: #8250df; }
  .d { fill: none; stroke: #0969da; stroke-width: 1.5; } .t { fill: none; stroke: #9a6700; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) { svg { background: #0d1117; } text { fill: #e6edf3; } .grid { stroke: #30363d; }
    .c0 { stroke: #57606a; } .c3 { stroke: #d2a8ff; } .d { stroke: #79c0ff; } .t { stroke: #e3b341; } }
"""


def drawn(curves: Mapping[str, Curve]) -> str:
    """An SVG of at most four curves by name, and the notebook's losses as circles and squares, as far as steps go."""
    last = max(1, *(step for curve in curves.values() for step in curve))
    numbered = list(enumerate(curves.items()))
    lines = [_line(number, curve, last) for number, (_, curve) in numbered]
    names = [_name(number, name) for number, (name, _) in numbered]
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">', f"<style>{STYLE}</style>"]
    return "\n".join([*head, *_grid(last), *lines, *names, *_notebook(last), "</svg>", ""])


def _grid(last: int) -> list[str]:
    parts = []
    for tenths in range(round(10 * LOW), round(10 * HIGH) + 1):
        x, y = _place(0, tenths / 10)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x - 12:.1f}" y="{y + 4:.1f}" text-anchor="end">{tenths / 10}</text>')
    for fifth in range(6):
        x, y = _place(fifth / 5, LOW)
        parts.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{last * fifth // 5}</text>')
    parts.append(f'<text x="{_place(0.5, LOW)[0]:.1f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    return [*parts, f'<text x="{LEFT + 6}" y="{TOP + 16}">loss</text>']


def _line(number: int, curve: Curve, last: int) -> str:
    places = [_place(step / last, loss) for step, loss in sorted(curve.items())]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="c{number}" stroke-width="{WIDE[number]}" points="{points}"/>'


def _name(number: int, name: str) -> str:
    x = LEFT + 124 * number
    line = f'<line class="c{number}" x1="{x}" y1="16" x2="{x + 22}" y2="16" stroke-width="{WIDE[number]}"/>'
    return f'{line}<text x="{x + 28}" y="20">{name}</text>'


def _notebook(last: int) -> list[str]:
    circles = [_circle(*_place(step / last, loss)) for step, loss in NOTEBOOK["d"].items() if step <= last]
    squares = [_square(*_place(step / last, loss)) for step, loss in NOTEBOOK["t"].items() if step <= last]
    x = LEFT + 124 * 4
    words = f'<text x="{x + 32}" y="20">the notebook</text>'
    return [*circles, *squares, _circle(x + 8, 16), _square(x + 22, 16), words]


def _circle(x: float, y: float) -> str:
    return f'<circle class="d" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'


def _square(x: float, y: float) -> str:
    return f'<rect class="t" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'


def _place(share: float, loss: float) -> tuple[float, float]:
    """Where a loss is drawn at this share of the steps, 0 to 1. One out of range is drawn at the edge."""
    height = HEIGHT - TOP - BOTTOM
    return LEFT + (WIDTH - LEFT - RIGHT) * share, TOP + height * (HIGH - min(max(loss, LOW), HIGH)) / (HIGH - LOW)
