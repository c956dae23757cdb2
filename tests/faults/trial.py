"""Runs one trial of the sweep and compares it with the undisturbed run: same bits, nothing left, little repeated."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults.sweep import MICROBATCHES, SNAPSHOT_EVERY, STEPS, Trial
from support import action_log
from support.action_log import Entry
from support.fork_server import ForkServer
from support.paths import TESTS

PLAN = TESTS / "support" / "tiny" / "stageline.toml"
CUTS = {2: [4], 4: [2, 4, 6]}


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """The result of a trial. `wrong`: each broken promise. `fired`: the number of kills that were carried out.

    `recoveries`: seconds from each kill of a worker until its replacement began to compute, and from each kill of the
    broker until the next one answered. `redone`: actions that were computed more than once.
    """

    trial: str
    wrong: list[str]
    fired: int
    recoveries: list[float]
    redone: int

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def run(fork_server: ForkServer, trial: Trial, folder: Path, redis: str = "") -> dict[str, Any]:
    """Runs a trial, which leaves its action log in `folder`. `redis`: the address of an empty database."""
    url = {"ipc": "ipc://", "tcp": "tcp://127.0.0.1:0", "redis": redis}[trial.transport]
    sets = (
        f"run.steps={STEPS}",
        f"run.dir={folder.parent}",
        f"schedule.microbatches={MICROBATCHES}",
        f"recovery.snapshot_every={SNAPSHOT_EVERY}",
        f"model.cut={CUTS[trial.stages]}",
        f"queues.url={url}",
        *(f"workers.{stage}.stages=[{stage}]" for stage in range(trial.stages)),
    )
    return fork_server.train(PLAN, *sets, folder=folder, kills=trial.kills)


def judge(trial: Trial, outcome: dict[str, Any], entries: Sequence[Entry], undisturbed: dict[str, Any]) -> TrialVerdict:
    """The verdict on the run of `trial`, given the outcome of one without kills."""
    kills = [entry for entry in entries if entry.what == action_log.KILLED]
    wrong = [*_outcome(outcome, undisturbed), *_surplus(entries, kills)]
    workers = sum(kill.process != "broker" for kill in kills)
    if outcome["facts"].get("restarts") != workers:
        wrong.append(f"{outcome['facts'].get('restarts')} workers were replaced, {workers} were killed")
    if _must_fire(trial) > len(kills):
        wrong.append(f"only {len(kills)} of {len(trial.kills)} kills were carried out")
    return TrialVerdict(str(trial), wrong, len(kills), _recoveries(entries, kills), _redone(entries))


def _outcome(outcome: dict[str, Any], undisturbed: dict[str, Any]) -> list[str]:
    if outcome["code"]:
        return [f"it ended with {outcome['code']}: {outcome['reason']}"]
    facts, expected = outcome["facts"], undisturbed["facts"]
    names = ("weights_sha256", "losses", "metrics", "training_steps")
    wrong = [f"{name} {facts[name]}, expected {expected[name]}" for name in names if facts[name] != expected[name]]
    wrong += [f"{name}: {outcome[name]}" for name in ("left", "orphans") if outcome[name]]
    return wrong


def _surplus(entries: Sequence[Entry], kills: Sequence[Entry]) -> list[str]:
    """Actions that were repeated needlessly: from before the newest checkpoint of that moment, or by survivors."""
    floors = {(kill.process, kill.generation): _checkpoint(entries, kill.when) for kill in kills}
    newest: dict[tuple[str, int, str], int] = {}
    wrong = []
    for each in (entry for entry in entries if entry.what == action_log.DONE):
        action = each.process, each.step, each.action
        before = newest.get(action)
        if before is not None and each.step < floors.get((each.process, before), STEPS):
            wrong.append(f"{each.process} did {each.action} of step {each.step} again in generation {each.generation}")
        newest[action] = each.generation
    return wrong


def _checkpoint(entries: Sequence[Entry], when: float) -> int:
    complete = [entry.step for entry in entries if entry.what == action_log.CHECKPOINT and entry.when < when]
    return max(complete, default=0)


def _redone(entries: Sequence[Entry]) -> int:
    done = Counter((entry.process, entry.step, entry.action) for entry in entries if entry.what == action_log.DONE)
    return sum(done.values()) - len(done)


def _recoveries(entries: Sequence[Entry], kills: Sequence[Entry]) -> list[float]:
    """Seconds from each kill to its recovery; a replacement that finds nothing left to do is not counted."""
    found = []
    for kill in kills:
        sign = action_log.ANSWERED if kill.process == "broker" else action_log.ACTION
        nexts = (
            e.when for e in entries if (e.process, e.generation, e.what) == (kill.process, kill.generation + 1, sign)
        )
        found += [when - kill.when for when in list(nexts)[:1]]
    return found


def _must_fire(trial: Trial) -> int:
    """How many kills must happen: the first of each worker. A run may end before the others are due."""
    return len({name for name, _ in trial.kills if name != "broker"})
