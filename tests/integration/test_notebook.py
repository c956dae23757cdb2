"""The notebook of the examples in a real kernel, which has threads and has computed; and what an interrupt leaves."""

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the client, which is not ours

HAS_COMPUTED = """
import torch
weights = torch.randn(500, 500, requires_grad=True)
(weights @ weights).relu().sum().backward()  # in several threads
"""

INTERRUPTED = """
import os, signal, threading
from stageline import LineClosed

try:
    with Line([build()[:4], build()[4:]], loss=smooth_loss, optimizer=torch.optim.SGD) as line:
        line.step(*loader.batch(0)).item()
        threading.Timer(0.05, os.killpg, (os.getpgrp(), signal.SIGINT)).start()  # as the button does
        while True:
            line.step(*loader.batch(line.position)).item()
except KeyboardInterrupt:
    print("interrupted")
"""

AFTERWARDS = """
import psutil

print(len(psutil.Process().children(recursive=True)), "processes")
try:
    line.step(*loader.batch(0))
except LineClosed as error:
    print(error)
with Line([build()[:4], build()[4:]], loss=smooth_loss, optimizer=torch.optim.SGD) as second:
    print(second.step(*loader.batch(0)).item() > 0)
line
"""


def text(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def html(cell: Any) -> str:
    return "".join(output.data.get("text/html", "") for output in cell.outputs if "data" in output)


def test_the_notebook_runs_and_an_interrupt_ends_a_line_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "digits").symlink_to(EXAMPLES / "digits")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    cells = [nbformat.v4.new_code_cell(source) for source in (HAS_COMPUTED, INTERRUPTED, AFTERWARDS)]
    notebook.cells = [cells[0], *notebook.cells, *cells[1:]]
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()

    _, *code, interrupted, afterwards = (cell for cell in notebook.cells if cell.cell_type == "code")
    loop, shown, timetable, weights = code[-4:]
    assert "epoch 5: loss" in text(loop)
    assert html(shown).startswith("<b>line</b>: finished, steps that have ended: ")
    assert html(shown).count("data:image/svg+xml") == 2
    assert text(timetable).startswith("1f1b as it ran, step ")
    assert float(weights.outputs[-1].data["text/plain"]) > 0.9
    said, told = sorted(text(interrupted).splitlines())  # of two streams
    assert said == "interrupted"
    assert told.startswith("stageline: the run is in runs/line-")
    assert text(afterwards).startswith("0 processes\nthis line is closed")
    assert text(afterwards).endswith("True\n")
    assert html(afterwards).startswith("<b>line</b>: 1 steps, loss ")  # of the second line
    assert "<b>line</b>: closed: KeyboardInterrupt was raised" in html(afterwards)
