"""`make sbom` and `make audit`: the bill has what users run, and a service that does not answer is said to be so."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

BILL = runpy.run_path(str(ROOT / "docker" / "bill.py"))
AUDIT = runpy.run_path(str(ROOT / "docker" / "audit.py"))
LINES = {
    "stageline": ["torch>=2.10", "Redis[hiredis]>=6", 'pytest>=8; extra == "test"'],
    "torch": ["sympy>=1", 'pytest; extra == "dev"', "stageline"],  # in a circle
    "redis": ['hiredis>=3; extra == "hiredis"', 'cryptography; extra == "ocsp"'],
    "pytest": ["pluggy"],
}


def bill_of(names: list[str]) -> dict[str, Any]:
    """Output of cyclonedx-py for an environment in which each package depends on all: it knows no extras."""
    refs = [f"{name}==1.0" for name in names]
    return {
        "bomFormat": "CycloneDX",
        "metadata": {"tools": {}},
        "components": [{"bom-ref": ref, "name": name} for ref, name in zip(refs, names, strict=True)],
        "dependencies": [{"ref": ref, "dependsOn": [each for each in refs if each != ref]} for ref in refs],
    }


def test_the_bill_has_what_is_required_without_extras_and_nothing_of_the_tests() -> None:
    names = ["stageline", "torch", "sympy", "redis", "hiredis", "cryptography", "pytest", "pluggy"]
    found = BILL["of_package"](bill_of(names), "stageline", lambda name: LINES.get(name, []))
    assert found["metadata"] == {"tools": {}, "component": {"bom-ref": "stageline==1.0", "name": "stageline"}}
    assert [each["name"] for each in found["components"]] == ["hiredis", "redis", "sympy", "torch"]
    graph = {each["ref"]: each["dependsOn"] for each in found["dependencies"]}
    assert graph["stageline==1.0"] == ["redis==1.0", "torch==1.0"]
    assert graph["redis==1.0"] == ["hiredis==1.0"]
    assert graph["torch==1.0"] == ["stageline==1.0", "sympy==1.0"]


def command(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", f"import sys, pathlib; out = pathlib.Path(sys.argv[sys.argv.index('-o') + 1]); {code}"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('No known vulnerabilities found', file=sys.stderr)", 0, "No known vulnerabilities found"),
        ("out.write_text('| torch | 1.0 | CVE-1 |'); sys.exit(1)", 1, "CVE-1"),
        ("sys.exit('ConnectionError: pypi.org')", 3, "did not answer, so that NOTHING was looked up: ConnectionError"),
        ("sys.exit(1)", 3, "did not answer"),
    ],
)
def test_an_audit_tells_what_was_found_from_a_service_that_did_not_answer(
    code: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip-audit ends with 1 in both cases."""
    assert AUDIT["main"]("folder", command(code)) == status
    assert said in capsys.readouterr().out


def test_the_makefile_runs_both_with_tools_of_their_own_and_no_check_of_a_change_does() -> None:
    text = (ROOT / "Makefile").read_text()
    rules = dict(re.findall(r"^([\w-]+):.*\n((?:\t.*\n)+)", text, re.MULTILINE))
    assert "docker/bill.py" in rules["sbom"]
    assert "docker/audit.py" in rules["audit"]
    assert not any(f"make {name}" in path.read_text() for name in ("audit", "sbom") for path in _of_ci())


def _of_ci() -> list[Path]:
    return [path for path in (ROOT / ".ci").glob("*") if path.is_file()]
