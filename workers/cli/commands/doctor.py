"""`stageline doctor`: checks this machine, and a plan on it."""

import sys
import tempfile
from pathlib import Path

import click
import msgspec

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options
from stageline.workers.cli.display.output import say
from stageline.workers.process.signals import Signals, exit_at_once

_SIGNS = {"good": "ok", "note": "note", "bad": "WRONG"}


@click.command(epilog="Example: stageline doctor examples/digits")
@click.argument("config", type=click.Path(), required=False)
@options.sets
@options.as_json
def doctor(config: str | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Check this machine and the plan CONFIG.

    Exits with 1 if something is wrong. Without CONFIG the plan in this folder is checked, if there is one.

    Two machines compute the same bits if they have the same fingerprint, run the same plan, and use deterministic
    operations. To find operations that are not deterministic, the plan's first step is computed twice and compared.
    """
    config = config or ("." if Path("stageline.toml").exists() else None)
    plan = options.plan_of(config, sets) if config else None
    from stageline.workers.preflight.doctor import CheckResult, Health, examine

    def leave(number: int) -> None:
        scratch.cleanup()
        exit_at_once(number)

    findings: list[CheckResult] = []
    out = sys.stdout
    scratch = tempfile.TemporaryDirectory(prefix="stageline-", ignore_cleanup_errors=True)
    # A signal ends the process at once, also in the middle of a user's code.
    with Signals(on_first=leave), scratch as folder, options.user_prints_to_stderr():
        for finding in examine(plan, Path(folder)):
            findings.append(finding)
            if not as_json:
                say(f"{_SIGNS[finding.health]:5} {finding.what}: {finding.found}", file=out)
    if as_json:
        click.echo(msgspec.json.encode({"schema": "doctor/1", "findings": findings}))
    return ExitCode.FAILED if any(finding.health is Health.BAD for finding in findings) else ExitCode.OK
