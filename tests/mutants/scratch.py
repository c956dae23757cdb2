"""A copy of a checkout with an environment of its own, in which `stageline` is that of the copy."""

import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE = "stageline_notes"
_COMMAND = "#!{python}\nimport sys\nfrom stageline.workers.cli import main\nsys.exit(main())\n"


@dataclass(frozen=True, slots=True)
class TestsEnded:
    """A run of tests: `failed` names the first that failed, "" if none did."""

    failed: str
    output: str


class ScratchCopy:
    """A copy of the checkout `root` in `folder`.

    Args:
        root: Checkout that is copied; it has `src/stageline`.
        folder: Empty folder for the copy and its environment.
        before: Words put before each command line of pytest, `("nice", "-n", "15")`.
    """

    def __init__(self, root: Path, folder: Path, before: Sequence[str] = ()) -> None:
        self.root = folder / "checkout"
        self._before = before
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout
        for file in filter(None, listed.split("\0")):
            if (root / file).is_symlink() or (root / file).exists():  # deleted files are listed, too
                (self.root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / file, self.root / file, follow_symlinks=False)
        venv.create(self.root / ".venv", symlinks=True)
        self._python = self.root / ".venv" / "bin" / "python"
        (self.packages,) = (self.root / ".venv" / "lib").glob("python*/site-packages")
        paths = [str(self.root / "src"), *(each for each in sys.path if each.endswith("site-packages"))]
        (self.packages / "scratch.pth").write_text("\n".join(paths) + "\n")
        shutil.copy(Path(__file__).with_name("notes.py"), self.packages / f"{MODULE}.py")
        command = self._python.with_name("stageline")
        command.write_text(_COMMAND.format(python=self._python))
        command.chmod(0o755)

    def write(self, file: str, source: bytes) -> None:
        (self.root / file).write_bytes(source)

    def pytest(self, arguments: Iterable[str], limit: float, *, notes: bool = False) -> TestsEnded:
        """Run pytest with `arguments`; tests that have not ended after `limit` seconds count as failed."""
        words = self.root.with_name("arguments.txt")
        words.write_text("\n".join(arguments))
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            *(["-p", MODULE] if notes else []),
        ]  # none of `-p` is read from a file
        command = [*self._before, str(self._python), "-m", "pytest", *options, f"@{words}"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with (
            self.root.with_name("output.txt").open("w+", encoding="utf-8", errors="replace") as output,
            subprocess.Popen(
                command, cwd=self.root, stdout=output, stderr=output, env=environment, start_new_session=True
            ) as process,
        ):
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return TestsEnded(f"(no end within {limit:.0f} s)", "")
            output.seek(0)
            text = output.read()
        failed = [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if code and not failed:
            return TestsEnded(f"(pytest ended with {code})", text)
        return TestsEnded(failed[0].partition(" - ")[0] if failed else "", text)
