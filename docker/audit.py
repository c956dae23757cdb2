"""Asks pip-audit for known vulnerabilities of what is installed, and says plainly if no answer came: `make audit`.

pip-audit ends with 1 in both cases. It is run by the interpreter that has it, with the folder of the packages.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FOUND, UNKNOWN = 1, 3  # exit codes


def main(packages: str, command: tuple[str, ...] = (sys.executable, "-m", "pip_audit")) -> int:
    """Print what is known; return 0 for no vulnerability, `FOUND`, or `UNKNOWN` if the service did not answer.

    Args:
        packages: Folder with the installed packages.
        command: Words that start pip-audit.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.md"
        words = [*command, "--path", packages, "--progress-spinner", "off", "-f", "markdown", "-o", str(report)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode == 0:
            print(done.stderr.strip() or "no known vulnerabilities")
            return 0
        if report.exists() and report.stat().st_size:
            print(report.read_text())
            return FOUND
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    print(f"make audit: the service with the vulnerabilities did not answer, so that NOTHING was looked up: {last}")
    return UNKNOWN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
