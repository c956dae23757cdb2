"""Trains the notebook's network synchronously and asynchronously, draws both curves beside the notebook's own figures.

.venv/bin/python docs/curves/draw.py        writes docs/curves/mlp.svg, prints the table
"""

import tempfile
from pathlib import Path

from stageline.workers import train

HERE = Path(__file__).parent
PLAN = HERE.parent.parent / "examples" / "mlp" / "stageline-async.toml"
NOTEBOOK = [0.691, 0.599, 0.423, 0.367, 0.348, 0.330, 0.426, 0.334, 0.276, 0.280]
AT = range(3, 10_000, 1000)  # the iterations at which the notebook printed
WINDOW = 100  # iterations that a drawn point is the mean of
WIDTH, HEIGHT, LEFT, TOP = 720, 300, 46, 34
LOW, HIGH = 0.2, 0.8
STYLE = """
  svg { font: 12px system-ui, sans-serif; background: #fff; }
  text { fill: #24292f; } .grid { stroke: #d8dee4; } polyline { fill: none; stroke-width: 1.6; }
  .a { stroke: #0969da; } .s { stroke: #bc4c00; } .n { stroke: #57606a; }
  @media (prefers-color-scheme: dark) { svg { background: #0d1117; } text { fill: #e6edf3; } .grid { stroke: #30363d; }
    .a { stroke: #58a6ff; } .s { stroke: #f0883e; } .n { stroke: #8b949e; } }
"""


def losses(mode: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        sets = (f'schedule.mode="{mode}"', "run.log_every=1", f"run.dir={folder}")
        found = train(PLAN, *sets).result.losses
    return [found[str(step)] or 0.0 for step in range(len(found))]


def mean(values: list[float], around: int, width: int) -> float:
    window = values[max(0, around - width // 2) : around + width // 2]
    return sum(window) / len(window)


def place(iteration: float, loss: float) -> str:
    x = LEFT + (WIDTH - LEFT - 24) * iteration / 10_000
    y = TOP + (HEIGHT - TOP - 34) * (HIGH - loss) / (HIGH - LOW)
    return f"{x:.1f},{y:.1f}"


def line(kind: str, points: list[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(place(*point) for point in points)}"/>'


def drawing(asynchronous: list[float], synchronous: list[float]) -> str:
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">', f"<style>{STYLE}</style>"]
    for tenths in range(2, 9):
        x, y = place(0, tenths / 10).split(",")
        parts.append(f'<line class="grid" x1="{x}" y1="{y}" x2="{WIDTH - 24}" y2="{y}"/>')
        parts.append(f'<text x="{float(x) - 8}" y="{float(y) + 4}" text-anchor="end">{tenths / 10}</text>')
    for iteration in range(0, 10_001, 2000):
        x = place(iteration, LOW).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 12}" text-anchor="middle">{iteration}</text>')
    steps = range(0, 10_000, WINDOW)
    parts.append(line("n", list(zip(AT, NOTEBOOK, strict=True))))
    parts.append(line("s", [(step, mean(synchronous, step + WINDOW // 2, WINDOW)) for step in steps]))
    parts.append(line("a", [(step, mean(asynchronous, step + WINDOW // 2, WINDOW)) for step in steps]))
    words = [("n", "the notebook, asynchronous"), ("a", "stageline, asynchronous"), ("s", "stageline, synchronous")]
    for index, (kind, text) in enumerate(words):
        x = LEFT + 220 * index
        parts.append(f'<line class="{kind}" x1="{x}" y1="16" x2="{x + 22}" y2="16" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 28}" y="20">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    asynchronous, synchronous = losses("async"), losses("sync")
    (HERE / "mlp.svg").write_text(drawing(asynchronous, synchronous))
    print("| iteration | the notebook | stageline, asynchronous | mean of 100 | stageline, synchronous | mean of 100 |")
    print("|---|---|---|---|---|---|")
    for at, notebook in zip(AT, NOTEBOOK, strict=True):
        ours = [f"{v:.3f}" for s in (asynchronous, synchronous) for v in (s[at], mean(s, at, WINDOW))]
        print(f"| {at} | {notebook:.3f} | {' | '.join(ours)} |")


if __name__ == "__main__":
    main()
