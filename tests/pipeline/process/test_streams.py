"""A process prints to streams that are full, closed or without a reader, and goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import sys
from pathlib import Path
from stageline.pipeline.process import streams

streams.keep_open()
{output}
with open("first") as first:  # gets no number of a standard stream
    print("a result")
    print("a log line", file=sys.stderr)
    sys.stdout.buffer.write(b"bytes")
    sys.stdout.flush()
    Path("said").write_text(f"{{first.fileno() > 2}} {{getattr(streams.lost_output(), 'errno', None)}}")
"""
LOSES = "streams.lose_output()"


def said(folder: Path, redirected: str, output: str = LOSES) -> tuple[int, str]:
    """The exit code of a process that prints, and what it has said of its streams in a file."""
    (folder / "first").touch()
    (folder / "prints.py").write_text(PRINTS.format(output=output))
    ended = subprocess.run(["sh", "-c", f"{sys.executable} prints.py {redirected}"], cwd=folder)
    return ended.returncode, (folder / "said").read_text() if (folder / "said").exists() else ""


@pytest.mark.parametrize(
    ("redirected", "lost"),
    [
        (">out 2>err", None),
        (">&- 2>&- <&-", None),
        (">&-", None),
        (">out 2>&-", None),
        (">/dev/full 2>/dev/full", 28),
        (">out 2>/dev/full", None),
        (">out </dev/null 1<&0", 9),  # stdout is open for reading alone
    ],
)
def test_what_a_stream_does_not_take_is_lost_and_the_process_goes_on(
    tmp_path: Path, redirected: str, lost: int | None
) -> None:
    assert said(tmp_path, redirected) == (0, f"True {lost}")


def test_what_a_stream_takes_is_not_lost(tmp_path: Path) -> None:
    said(tmp_path, ">out 2>err")
    assert [(tmp_path / name).read_text() for name in ("out", "err")] == ["a result\nbytes", "a log line\n"]


def test_a_process_whose_result_is_what_it_prints_fails_if_stdout_takes_nothing(tmp_path: Path) -> None:
    code, text = said(tmp_path, ">/dev/full 2>/dev/full", output="")
    assert code != 0
    assert text == ""


def test_a_stream_without_a_reader_loses_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    (tmp_path / "prints.py").write_text(PRINTS.format(output=LOSES))
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "prints.py"], cwd=tmp_path, stdout=writing, stderr=writing)
    os.close(writing)
    assert ended.returncode == 0
    assert (tmp_path / "said").read_text() == "True 32"


def test_a_full_file_that_is_set_not_to_block_is_waited_for(tmp_path: Path) -> None:
    """A pipe that another process has made non-blocking takes all, once there is a reader."""
    (tmp_path / "first").touch()
    (tmp_path / "prints.py").write_text(PRINTS.format(output=LOSES).replace('"a result"', '"r" * 2**20'))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen([sys.executable, "prints.py"], cwd=tmp_path, stdout=writing) as process:
        os.close(writing)
        with os.fdopen(reading) as file:
            assert file.read() == "r" * 2**20 + "\nbytes"
        assert process.wait() == 0
