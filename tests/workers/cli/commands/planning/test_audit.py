"""`stageline audit`."""

import pytest

from support.answers import conforming
from support.workspace import Workspace


def test_a_table_pictures_and_plain_words(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert workspace.here("audit", ".", "--cut", "2", "--rows", "24", "--defences", "--out", "told") == 0
    shown = capsys.readouterr()
    assert "Splitting alone is not privacy" in shown.out
    assert "equal norms" in shown.out
    assert "stageline: cut 2, defence none: measured" in shown.err
    facts = conforming((workspace.folder / "told" / "audit.json").read_text())
    assert facts["schema"] == "audit/1"
    assert len(facts["cuts"]) == 4


def test_json_is_the_report_and_a_cut_that_is_none_is_refused(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workspace.here("audit", ".", "--rows", "24", "--json", "--set", "queues.codec=bf16") == 0
    found = conforming(capsys.readouterr().out)["cuts"]
    assert [(each["cut"], each["codec"], each["codec_back"]) for each in found] == [
        (1, "bf16", "bf16"),
        (2, "bf16", "bf16"),
    ]
    assert workspace.here("audit", ".", "--cut", "3") == 78
    assert "there is no cut before layer 3" in capsys.readouterr().err
