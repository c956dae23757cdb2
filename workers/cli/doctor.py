"""`stageline doctor`: is this machine fit, and is the plan?"""

import click
import msgspec

from . import options
from .failure import Exit


@click.command(epilog="Example: stageline doctor examples/digits")
@click.argument("config", type=click.Path(), required=False)
@options.sets
@options.as_json
def doctor(config: str | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Examine this machine and the plan CONFIG.

    Exits with 1 if something is wrong. Without CONFIG only the machine is looked at.

    Two machines compute the same bits if they have the same fingerprint and run one plan. The codec of the queues
    loses nothing; what remains are operations that are not deterministic, for which a plan's first step is computed
    twice.
    """
    plan = options.plan_of(config, sets) if config else None
    from ..doctor import Finding, Health, examine

    findings: list[Finding] = []
    for finding in examine(plan):
        findings.append(finding)
        if not as_json:
            click.echo(f"{_SIGNS[finding.health]:5} {finding.what}: {finding.found}")
    if as_json:
        click.echo(msgspec.json.encode({"schema": "doctor/1", "findings": findings}))
    return Exit.FAILED if any(finding.health is Health.BAD for finding in findings) else Exit.OK


_SIGNS = {"good": "ok", "note": "note", "bad": "WRONG"}
