"""The page of a script's run in a notebook: `Line.show`."""

from functools import partial
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

from stageline import Line
from stageline.workers.script.processes.panels import panels_of
from support.workspace import Workspace

SCRIPT = """
from functools import partial
import torch
from torch import nn
from stageline import Line

model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = partial(torch.optim.SGD, lr=0.1)
with Line(model, cut=[2], loss=nn.functional.mse_loss, optimizer=optimizer, name="shown") as line:
    for _ in range(4):
        line.step(torch.ones(4, 2), torch.ones(4, 1)).item()
    open("during.html", "w").write(line.show()._repr_html_())
open("after.html", "w").write(line.show()._repr_html_())
"""


def page_in(element: str) -> str:
    """The document in an element of a notebook's page."""
    head, _, rest = element.partition(' srcdoc="')
    assert head.startswith('<iframe title="run ')
    assert 'sandbox="allow-scripts"' in head
    assert rest.endswith('"></iframe>')
    document = rest.removesuffix('"></iframe>')
    assert '"' not in document
    return unescape(document)


def test_a_run_that_is_over_is_shown_from_its_records(workspace: Workspace) -> None:
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    (folder,) = workspace.runs()
    page = page_in(panels_of(workspace.folder / folder, "", None))
    assert page.startswith("<!doctype html>")
    assert f'"id":"{folder.name}"' in page


def test_where_nothing_answers_a_sentence_says_why(tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text("<b>{")
    said = panels_of(tmp_path, "", None)
    assert said.startswith("<p>")
    assert "process.json is damaged" in said
    assert "<b>" not in said


def test_an_inline_line_shows_itself() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with Line([nn.Linear(2, 1)], loss=nn.functional.mse_loss, optimizer=optimizer, workers="inline") as line:
        assert line.show()._repr_html_() == line._repr_html_()


@pytest.mark.slow
def test_a_line_is_shown_while_it_trains_and_afterwards(workspace: Workspace) -> None:
    workspace.write("script.py", SCRIPT)
    script = workspace.start("script", str(workspace.folder / "script.py"))
    _, errors = script.communicate()
    assert script.returncode == 0, errors
    during, after = (page_in((workspace.folder / f"{name}.html").read_text()) for name in ("during", "after"))
    assert '"source":"broker"' in during
    assert '"phase":"finished"' in after
