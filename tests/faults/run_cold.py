"""Kills processes of runs that are started as a user starts them, and demands the bits of the undisturbed run.

    make faults                                           all trials, 50 over each transport; the tables go into
                                                          docs/project/promises.md
    python -m faults.run_cold --trials 12                 the first of them
    python -m faults.run_cold --transport tcp             those over tcp
    python -m faults.run_cold --only redis/17             one, by its name
    python -m faults.run_cold --only ipc/3 --plan examples/digits      the same kills in another plan

Run it from the project's folder with PYTHONPATH=tests, on a machine that does nothing else: recovery is measured.
Quiet trials run one at a time; busy ones two at a time, beside a process that only computes. Verdicts are kept in
runs/faults-cold.jsonl; interrupted trials continue there. --fresh starts over.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import click

from faults import cold_table
from faults.cold import TRANSPORTS, ColdTrial, all_cold_trials
from faults.cold_trial import ColdOutcome, ColdVerdict, judge, run
from faults.verdict_log import VerdictLog, shown
from support.redis_server import RedisServer

LOG = VerdictLog(Path("runs") / "faults-cold.jsonl", ColdVerdict)
COMPUTES = "while True: sum(range(10**6))"


@click.command()
@click.option("--trials", type=click.IntRange(min=1), help="At most so many: the first ones.")
@click.option("--transport", type=click.Choice(TRANSPORTS), multiple=True, help="Over this transport only.")
@click.option("--only", multiple=True, metavar="NAME", help="The trial of this name, even if it was run before.")
@click.option("--plan", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A folder with a plan.")
@click.option("--fresh", is_flag=True, help="Run again what was run before.")
def main(trials: int | None, transport: tuple[str, ...], only: tuple[str, ...], plan: Path | None, fresh: bool) -> None:
    """Kill and compare. The exit code is 1 if any trial broke a promise."""
    if fresh:
        LOG.clear()
    keeps = not (only or plan)
    kept = LOG.read() if keeps else {}
    wanted = [ColdTrial.parse(name) for name in only] or all_cold_trials()
    chosen = [trial for trial in wanted if not transport or trial.transport in transport][:trials]
    left = [trial for trial in chosen if str(trial) not in kept]
    click.echo(f"{len(chosen)} trials of cold processes, {len(chosen) - len(left)} of them done before")
    with RedisServer(appendfsync="no") as redis:
        for verdict in shown(_named(ColdRuns(redis, plan).verdicts(left)), len(left), "faults.run_cold", 10):
            kept[verdict.trial] = verdict
            if keeps:
                LOG.append(verdict)
    found = [kept[str(trial)] for trial in chosen]
    click.echo(cold_table.tables(found))
    if keeps and chosen == all_cold_trials():
        cold_table.write(found)
    sys.exit(any(verdict.wrong for verdict in found))


class ColdRuns:
    """Runs trials, first the quiet ones, and judges them by the undisturbed run over the same transport."""

    def __init__(self, redis: RedisServer, plan: Path | None) -> None:
        self._redis = redis
        self._plan = plan
        self._undisturbed = cache(self._run_undisturbed)

    def verdicts(self, trials: Sequence[ColdTrial]) -> Iterator[ColdVerdict]:
        """Yields verdicts in the order in which the trials end."""
        for transport in dict.fromkeys(trial.transport for trial in trials):
            self._undisturbed(transport)
        for trial in trials:
            if not trial.busy:
                yield self._judge(trial)
        busy = [trial for trial in trials if trial.busy]
        if busy:
            with _load(), ThreadPoolExecutor(2) as pool:
                for done in as_completed([pool.submit(self._judge, trial) for trial in busy]):
                    yield done.result()

    def _judge(self, trial: ColdTrial) -> ColdVerdict:
        outcome, home = self._run(trial.transport, trial)
        verdict = judge(trial, outcome, self._undisturbed(trial.transport))
        if verdict.wrong:
            verdict.wrong.append(f"its logs are in {home}")
        else:
            shutil.rmtree(home)
        return verdict

    def _run_undisturbed(self, transport: str) -> ColdOutcome:
        outcome, home = self._run(transport, None)
        if outcome.code or outcome.left:
            raise click.ClickException(f"undisturbed, in {home}: {outcome.errors} {outcome.left}")
        shutil.rmtree(home)
        return outcome

    def _run(self, transport: str, trial: ColdTrial | None) -> tuple[ColdOutcome, Path]:
        home = Path(tempfile.mkdtemp(prefix="faults-"))
        database = self._redis.own_number()
        urls = {"ipc": "ipc://", "tcp": "tcp://127.0.0.1:0", "redis": self._redis.tcp_url_of(database)}
        try:
            return run(trial, home, urls[transport], self._plan), home
        finally:
            with closing(self._redis.client(database)) as client:
                client.flushdb()


@contextmanager
def _load() -> Iterator[None]:
    """A process that only computes."""
    process = subprocess.Popen([sys.executable, "-c", COMPUTES])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _named(verdicts: Iterator[ColdVerdict]) -> Iterator[ColdVerdict]:
    """Prints each trial with the seconds until what was killed was there again."""
    for verdict in verdicts:
        click.echo(f"{ColdTrial.parse(verdict.trial).words()}: {verdict.workers or verdict.brokers} s")
        yield verdict


if __name__ == "__main__":
    main()
