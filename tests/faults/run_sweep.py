"""Kills processes of real runs at every place of their programs, and demands the bits of the undisturbed run.

    make faults                                             all trials; the table goes into docs/project/promises.md
    python -m faults.run_sweep --trials 1000                a fair sample, which writes the table, too
    python -m faults.run_sweep --trials 60 --transport tcp  some of them
    python -m faults.run_sweep --only redis/4/worker-1@17   one, by its name

Run it from the project's folder with PYTHONPATH=tests. Verdicts are kept in runs/faults.jsonl; an interrupted sweep
continues there. --fresh starts over.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from faults import promises_table
from faults.sweep import STAGES, TRANSPORTS, Trial, all_trials
from faults.trial import TrialVerdict, judge, run
from faults.verdict_log import VerdictLog, shown
from support import action_log
from support.fork_server import ForkServer
from support.redis_server import RedisServer

ENOUGH = 1000  # trials, a fair sample of all, after which the table is written
UNDISTURBED = Trial("ipc", 2, ())
LOG = VerdictLog(Path("runs") / "faults.jsonl", TrialVerdict)


@click.command()
@click.option("--trials", type=click.IntRange(min=1), help="At most so many: the first of the list, which is shuffled.")
@click.option("--transport", type=click.Choice(TRANSPORTS), multiple=True, help="Over this transport only.")
@click.option(
    "--stages", type=click.Choice([str(stages) for stages in STAGES]), multiple=True, help="With so many stages only."
)
@click.option("--only", multiple=True, metavar="NAME", help="The trial of this name, even if it was run before.")
@click.option("--jobs", default=3, show_default=True, type=click.IntRange(min=1), help="Trials at a time.")
@click.option("--fresh", is_flag=True, help="Run again what was run before.")
def main(
    trials: int | None,
    transport: tuple[str, ...],
    stages: tuple[str, ...],
    only: tuple[str, ...],
    jobs: int,
    fresh: bool,
) -> None:
    """Kill and compare. The exit code is 1 if any trial broke a promise."""
    if fresh:
        LOG.clear()
    kept = {} if only else LOG.read()
    wanted = [Trial.parse(name) for name in only] or all_trials()
    chosen = [
        trial
        for trial in wanted
        if (not transport or trial.transport in transport) and (not stages or str(trial.stages) in stages)
    ][:trials]
    left = [trial for trial in chosen if str(trial) not in kept]
    click.echo(f"{len(chosen)} trials, {len(chosen) - len(left)} of them done before")
    with RedisServer(appendfsync="no") as redis, closing(Sweep(redis, jobs)) as sweep:
        for verdict in shown(sweep.run(left), len(left), "faults.run_sweep", 20):
            kept[verdict.trial] = verdict
            if not only:
                LOG.append(verdict)
    found = [kept[str(trial)] for trial in chosen]
    click.echo(promises_table.table(found))
    if not only and chosen == all_trials()[: len(chosen)] and len(chosen) >= ENOUGH:
        promises_table.write(found)
    sys.exit(any(verdict.wrong for verdict in found))


class Sweep:
    """Runs several trials at a time."""

    def __init__(self, redis: RedisServer, jobs: int) -> None:
        self._redis = redis
        self._pool = ThreadPoolExecutor(jobs)
        self._fork_server = ForkServer()

    def run(self, trials: Iterable[Trial]) -> Iterator[TrialVerdict]:
        """Yields verdicts in the order in which the trials end."""
        undisturbed, _ = self._run_trial(UNDISTURBED)
        if undisturbed["code"]:
            raise click.ClickException(undisturbed["reason"])
        for done in as_completed([self._pool.submit(self._judge, trial, undisturbed) for trial in trials]):
            yield done.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._fork_server.close()

    def _judge(self, trial: Trial, undisturbed: dict[str, Any]) -> TrialVerdict:
        try:
            outcome, folder = self._run_trial(trial)
        except RuntimeError as error:
            return TrialVerdict(str(trial), [str(error)], 0, [], 0)
        verdict = judge(trial, outcome, action_log.read(folder), undisturbed)
        if verdict.wrong:
            verdict.wrong.append(f"its logs are in {folder}")
        else:
            shutil.rmtree(folder.parent)
        return verdict

    def _run_trial(self, trial: Trial) -> tuple[dict[str, Any], Path]:
        folder = Path(tempfile.mkdtemp(prefix="faults-")) / "tiny"
        database = self._redis.own_number()
        try:
            return run(self._fork_server, trial, folder, self._redis.tcp_url_of(database)), folder
        finally:
            with closing(self._redis.client(database)) as client:
                client.flushdb()


if __name__ == "__main__":
    main()
