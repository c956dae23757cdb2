"""Runs the named benchmarks, or all; a run of all writes docs/project/performance.md."""

from collections.abc import Callable
from pathlib import Path

import click

from .claims import (
    codecs,
    coordinator_load,
    data_ahead,
    evaluation_cost,
    freezing,
    keys_cost,
    latency,
    memory,
    offload,
    python_cost,
    queue_speed,
    read_verbs,
    recording_cost,
    recovery_cost,
    redis_speed,
    relay_cost,
    replicas,
    rungs,
    script_speed,
    sealing_cost,
    startup,
    throughput,
    transports,
    weights,
    zero_bubble,
)
from .measuring.finding import BenchmarkResult
from .measuring.machine import commit, machine
from .measuring.rounds import PROGRESS

ROOT = Path(__file__).parent.parent

CLAIMS: dict[str, Callable[[int], BenchmarkResult]] = {
    "throughput": throughput.measure,
    "rungs": rungs.measure,
    "transports": transports.measure,
    "script": script_speed.measure,
    "recovery": recovery_cost.measure,
    "evaluation": evaluation_cost.measure,
    "queues": queue_speed.measure,
    "redis": redis_speed.measure,
    "sealing": sealing_cost.measure,
    "keys": keys_cost.measure,
    "relay": relay_cost.measure,
    "python": python_cost.measure,
    "codecs": codecs.measure,
    "data": data_ahead.measure,
    "freezing": freezing.measure,
    "latency": latency.measure,
    "memory": memory.measure,
    "offload": offload.measure,
    "replicas": replicas.measure,
    "startup": startup.measure,
    "weights": weights.measure,
    "coordinator": coordinator_load.measure,
    "read-verbs": read_verbs.measure,
    "recording": recording_cost.measure,
    "zero-bubble": zero_bubble.measure,
}


@click.command()
@click.argument("claims", nargs=-1, type=click.Choice(list(CLAIMS)))
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Rounds; in each, every contestant runs once.",
)
def main(claims: tuple[str, ...], rounds: int) -> None:
    """Measure CLAIMS (default: all) and write the figures to runs/bench/.

    Each turn is shown as it ends, and is a line of rounds.jsonl there. After Ctrl-C, the figures are those of the
    rounds that were whole.
    """
    PROGRESS.file = ROOT / "runs" / "bench" / "rounds.jsonl"
    PROGRESS.commit = commit()
    findings = {}
    try:
        for name in claims or CLAIMS:
            click.echo(f"{name}:", err=True)
            PROGRESS.claim = name
            findings[name] = _take(name, rounds)
            if PROGRESS.interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        measured = ", ".join(findings) or "no benchmark"
        click.echo(f"interrupted: {measured} was measured; each turn is a line of {PROGRESS.file}", err=True)
        raise click.exceptions.Exit(130) from None
    if not claims:
        page = ROOT / "docs" / "project" / "performance.md"
        page.write_text(_page(list(findings.values()), rounds), encoding="utf-8")


def _take(name: str, rounds: int) -> BenchmarkResult:
    finding = CLAIMS[name](rounds)
    finding.write(ROOT / "runs" / "bench" / f"{name}.json", machine())
    click.echo(f"{finding}\n")
    return finding


def _page(findings: list[BenchmarkResult], rounds: int) -> str:
    described = ", ".join(f"{key} {value}" for key, value in machine().items())
    head = f"# Performance\n\nMeasured by `make bench`, {rounds} rounds, on: {described}."
    return "\n\n".join([head, *map(str, findings)]) + "\n"


if __name__ == "__main__":
    main()
