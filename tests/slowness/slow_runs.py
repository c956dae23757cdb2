"""Kinds of real runs, each drawn so many times at random in stage and size: is what `why` names right?

    python -m slowness.slow_runs --seeds 10                  190 runs of about ten seconds, three at a time
    python -m slowness.slow_runs --seeds 3 --only "slow disk"

Run it from the project's folder with PYTHONPATH=tests. It prints a row for each kind, and each answer that is wrong.
Waits for the order of a schedule have no kind: a run has one in ten seconds, which takes no time.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from slowness.slow_run import CASES, SlowCase, answer, causes, draw
from support.fork_server import ForkServer
from support.workspace import Workspace

ENOUGH = 0.95  # of the answers, which have to be right


@click.command()
@click.option("--seeds", default=10, show_default=True, type=click.IntRange(min=1), help="Runs of each kind.")
@click.option("--first", default=0, show_default=True, type=click.IntRange(min=0), help="The first seed.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this kind.")
@click.option("--jobs", default=3, show_default=True, type=click.IntRange(min=1), help="Runs at a time.")
def main(seeds: int, first: int, only: tuple[str, ...], jobs: int) -> None:
    """Run, ask and compare. The exit code is 1 if fewer than 95 % of the answers are right."""
    server = ForkServer()
    wanted = [(case, seed) for seed in range(first, first + seeds) for case in CASES if not only or case.name in only]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda each: _is_right(server, *each), wanted))
    server.close()
    total = sum(found)
    for case in CASES:
        right = [each for each, (one, _) in zip(found, wanted, strict=True) if one is case]
        if right:
            click.echo(f"{case.name:30} {sum(right):3} right {len(right) - sum(right):3} wrong")
    click.echo(f"{'all':30} {total:3} right {len(found) - total:3} wrong, {total / len(found):.1%}")
    sys.exit(total < ENOUGH * len(found))


def _is_right(server: ForkServer, case: SlowCase, seed: int) -> bool:
    drawn = draw(case, seed)
    with tempfile.TemporaryDirectory() as folder, Workspace(Path(folder), server) as workspace:
        told = answer(drawn, workspace)
    right = causes(told) == drawn.right
    if not right:
        shares = [f"{each['cause']} {each['share']:.2f}" for each in told["findings"]]  # type: ignore[attr-defined]
        click.echo(f"{case.name}, seed {seed}: it is {sorted(drawn.right, key=str)}, and told is {shares}", err=True)
    return right


if __name__ == "__main__":
    main()
