"""`stageline doctor`: what it finds on this machine and in a plan."""

import json


def test_doctor_finds_this_machine_and_the_small_plan_well(workspace, capsys):
    assert workspace.here("doctor", ".", "--json") == 0
    findings = {each["what"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert {"torch", "package stageline", "ipc sockets", "fingerprint", "determinism"} <= set(findings)
    assert "same bits" in findings["determinism"]["found"]


def test_doctor_finds_data_that_is_not_the_same_twice(workspace, capsys):
    text = (workspace.folder / "data.py").read_text()
    workspace.write(
        "data.py", text.replace("generator=torch.Generator().manual_seed(1)", "generator=entropy()") + ENTROPY
    )
    assert workspace.here("doctor", ".") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1
    assert wrong[0].startswith("WRONG determinism")


ENTROPY = """
def entropy():
    generator = torch.Generator()
    generator.seed()
    return generator
"""


def test_doctor_names_what_is_wrong_with_a_plan_and_looks_on(workspace, capsys):
    assert workspace.here("doctor", ".", "--set", "model.cut=[7]") == 1
    said = capsys.readouterr().out
    assert "WRONG plan: model.cut = [7]" in said
    assert "ok    run.dir" in said
