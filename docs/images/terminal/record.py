"""Records the terminal session of README.md: a run, the run again with a worker killed, and the same digest.

    python docs/images/terminal/record.py       runs both, takes a minute, writes kill.svg beside this file

Each line of the picture is what a process printed. Process ids, times and digests are those of the recorded runs.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from time import monotonic, sleep
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("kill.svg")
STAGELINE = str(Path(sys.executable).with_name("stageline"))
COLUMNS, LINE, PATIENCE = 94, 19, 120.0  # characters, pixels, seconds
TYPED, PRINTED = 'fill="#f8fafc" font-weight="700"', 'fill="#cbd5e1"'
SCRIPT = """
from functools import partial
from hashlib import sha256

import torch
from torch import nn

from stageline import Line

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
inputs = torch.randn(3000, 64, 16)
loader = [(x, x[:, :4].argmax(1)) for x in inputs]

with Line(model, cut=[2], loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1)) as line:
    for x, y in loader:
        loss = line.step(x, y)
    weights = line.state_dict()

print("loss", loss)
print("weights", sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest())
"""


def session(folder: Path) -> list[str]:
    """Run the script twice in `folder`, kill worker 1 of the second run, and return the lines of both terminals.

    Raises:
        RuntimeError: The digests differ, or the worker was not found in time.
    """
    (folder / "first.py").write_text(SCRIPT)
    undisturbed = subprocess.run([sys.executable, "first.py"], cwd=folder, capture_output=True, text=True, check=True)
    disturbed = subprocess.Popen(
        [sys.executable, "first.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    row, pid = _worker(folder)
    os.kill(pid, signal.SIGKILL)
    out, told = disturbed.communicate(timeout=PATIENCE)
    if out != undisturbed.stdout:
        raise RuntimeError(f"the runs differ: {undisturbed.stdout!r}, and after the kill {out!r}")
    return [
        "$ python first.py",
        *undisturbed.stdout.splitlines(),
        "$ python first.py &",
        "$ stageline status | grep worker-1",
        row,
        f"$ kill -9 {pid}",
        *told.splitlines(),
        *out.splitlines(),
    ]


def _worker(folder: Path) -> tuple[str, int]:
    """Return the line of `stageline status` about worker 1 in mid-run, and its process id."""
    until = monotonic() + PATIENCE
    while monotonic() < until:
        asked = subprocess.run([STAGELINE, "status"], cwd=folder, capture_output=True, text=True)
        status = asked.stdout
        step = re.search(r"^  step (\d+)", status, re.MULTILINE)
        row = re.search(r"^(1 .*worker-1, pid (\d+) on .*)$", status, re.MULTILINE)
        if ": running" in status and step and row and 200 < int(step[1]) < 2500:
            return re.sub(r" on \S+", "", row[1]), int(row[2])
        sleep(0.2)
    raise RuntimeError(f"worker 1 was not seen in mid-run within {PATIENCE:g} s")


def drawn(lines: list[str]) -> str:
    """Return an SVG that shows `lines` as a terminal does; lines that are typed are bold."""
    shown = [
        (part, line.startswith("$ "))
        for line in lines
        for part in textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_long_words=False)
    ]
    width, height = 8 * COLUMNS + 40, LINE * len(shown) + 34
    rows = "\n".join(
        f'<text x="20" y="{30 + LINE * number}" xml:space="preserve" {TYPED if typed else PRINTED}>'
        f"{escape(part)}</text>"
        for number, (part, typed) in enumerate(shown)
    )
    title = "A worker is killed in the second run; both runs print the same digest"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{title}" font-family="ui-monospace, monospace" font-size="13">\n<title>{title}</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#0f172a"/>\n{rows}\n</svg>\n'
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="stageline-record-") as name:
        PICTURE.write_text(drawn(session(Path(name))), encoding="utf-8")
