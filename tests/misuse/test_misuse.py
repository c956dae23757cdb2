"""Mistakes of users, and faults of their code in a run: each ends, with its message and its exit code.

None hangs, none succeeds falsely, none leaves a process, a temporary file, a result or weights behind. The rows are in
the files beside this one; docs/project/promises.md shows them.
"""

import pytest

from misuse import pages
from misuse.case import Misuse
from support.fork_server import ForkServer
from support.workspace import Workspace

SAMPLED = 4  # every so many of the quick rows is run in `make test`, the others in `make test-all`

KINDS = [(kind.split()[-1], row) for kind, rows in pages.KINDS.items() for row in rows]
ROWS = [
    pytest.param(row, id=f"{kind}: {row.what}", marks=[pytest.mark.slow] if row.slow or number % SAMPLED else [])
    for number, (kind, row) in enumerate(KINDS)
]


@pytest.fixture(scope="session")
def digest(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> str:
    """Of the weights of a run in which nothing goes wrong."""
    with Workspace(tmp_path_factory.mktemp("undisturbed"), fork_server) as workspace:
        return _digest(workspace.command("train", ".", "--set", "queues.url=memory://").stdout)


@pytest.mark.parametrize("row", ROWS)
def test_what_goes_wrong_ends_with_its_message_and_its_exit_code(
    row: Misuse, workspace: Workspace, digest: str
) -> None:
    ended = row.run(workspace)
    assert ended.returncode == row.code, ended.stderr
    _assert_said(row, f"{ended.stdout}\n{ended.stderr}")
    assert "Traceback" not in ended.stderr
    assert not [sign for sign in ended.stderr if not (sign.isprintable() or sign in "\n\t")]
    assert _results(workspace) if row.finishes else not _results(workspace)
    assert not row.bits or _digest(ended.stdout) == digest


def test_the_page_shows_the_rows_as_they_are() -> None:
    assert pages.written() == pages.tables(), "PYTHONPATH=tests python -m misuse.pages writes it"


def test_no_two_rows_are_the_same_and_there_are_enough() -> None:
    names = [param.id for param in ROWS]
    assert len(set(names)) == len(names) >= 60


def _assert_said(row: Misuse, text: str) -> None:
    """Each part of it, in their order."""
    place = 0
    for part in row.said:
        place = text.find(part, place)
        assert place >= 0, f"{part!r} is not said, or not there, in: {text}"
        place += len(part)


def _digest(result: str) -> str:
    return next(line.split()[1] for line in result.splitlines() if line.startswith("weights_sha256 "))


def _results(workspace: Workspace) -> list[str]:
    found = (*workspace.folder.rglob("result.json"), *workspace.folder.glob("runs/*/stage-*.safetensors"))
    return sorted(str(path.relative_to(workspace.folder)) for path in found)
