"""`stageline doctor`: checks this machine, and a plan on it."""

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click
import msgspec

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.signals import Signals, exit_at_once
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import answer, say

if TYPE_CHECKING:
    from stageline.pipeline.process.child import Child

_SIGNS = {"good": "ok", "note": "note", "bad": "WRONG"}


@click.command(
    cls=Command,
    examples=(
        "stageline doctor --keys --broker 'tcp://desk:7000#k1....'",
        "stageline doctor --from report.zip",
    ),
    groups={"Checks": ("--keys", "--from")},
    codes=codes(ExitCode.REFUSED, ok="nothing is wrong", failed="something is wrong"),
)
@click.argument("config", type=click.Path(), required=False, shell_complete=completion.plans)
@options.sets
@click.option("--keys", is_flag=True, help="Check the keys alone, and ask the broker if it admits this machine's.")
@click.option(
    "--broker",
    callback=broker_address.address(dials=True),
    metavar="ADDRESS",
    help="Broker to ask: an address or a join line, in place of the plan's.",
)
@click.option(
    "--from",
    "bundle",
    type=click.Path(),
    metavar="BUNDLE",
    help="Tell what a bundle of a run says, and check nothing here.",
)
@options.as_json
def doctor(
    config: str | None, sets: tuple[str, ...], keys: bool, broker: str | None, bundle: str | None, as_json: bool
) -> int:
    """Check this machine and the plan CONFIG.

    Without CONFIG the plan in this folder is checked, if there is one.

    Two machines compute the same bits if they have the same fingerprint, run the same plan, and use deterministic
    operations. To find operations that are not deterministic, two processes compute a microbatch, and are compared.
    """
    if bundle is not None:
        if config or sets or keys or broker:
            raise click.UsageError("--from reads a bundle alone: leave out CONFIG, --set, --keys and --broker")
        return _read(Path(bundle), as_json)
    config = config or ("." if Path("stageline.toml").exists() else None)
    plan, arguments = (options.plan_of(config, sets), options.plan_arguments(config, sets)) if config else (None, [])
    from stageline.broker.keys.parties import parties_of
    from stageline.pipeline.plan.keys.deployment import BrokerPlan
    from stageline.workers.extras.preflight.doctor import CheckResult, Health, examine, examine_keys
    from stageline.workers.extras.preflight.trials import try_plan
    from stageline.workers.launch import template

    def leave(number: int) -> None:
        to_clean.close()
        exit_at_once(number)

    findings: list[CheckResult] = []

    def show(found: Iterable[CheckResult]) -> None:
        for finding in found:
            findings.append(finding)
            if not as_json:
                say(f"{_SIGNS[finding.health]:5} {finding.what}: {finding.found}")

    def answered() -> int:
        answer({"schema": "doctor/1", "findings": findings}, as_json, tuple)
        return ExitCode.FAILED if any(finding.health is Health.BAD for finding in findings) else ExitCode.OK

    if keys:
        planned = BrokerPlan() if plan is None else plan.broker
        url = broker_address.told(broker) or planned.url
        parties = () if plan is None else parties_of(plan)
        show(examine_keys(url, insecure=planned.insecure, environment=os.environ, parties=parties))
        return answered()
    # A signal ends the process at once, also in the middle of a user's code.
    with ExitStack() as to_clean, Signals(on_first=leave):
        folder = to_clean.enter_context(tempfile.TemporaryDirectory(prefix="stageline-", ignore_cleanup_errors=True))
        one, other = (to_clean.enter_context(template.Template()) for _ in range(2))
        templates = cycle((one, other))  # whose processes hash otherwise, so that sets have other orders

        def spawn(arguments: Sequence[str], log: TextIO) -> "Child":
            return next(templates)(arguments, log)

        show(examine(plan, Path(folder), partial(try_plan, arguments=arguments, spawn=spawn)))
    return answered()


def _read(bundle: Path, as_json: bool) -> int:
    """Print what a bundle tells; return the exit code."""
    from stageline.workers.cli.bundle import report_of, tell
    from stageline.workers.cli.commands.queries import show_cause, show_status

    found = report_of(bundle)
    facts = {"schema": "doctor-from/1", **msgspec.to_builtins(found)}
    answer(facts, as_json, lambda: tell(found, show_status, show_cause))
    return ExitCode.OK
