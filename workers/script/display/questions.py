"""What a script asks the broker of its run, for people to read. For any thread: each question has its own connection.

A broker that does not answer is gone, or busy: then nothing is known, which is no error.
"""

from time import time
from typing import Any

from stageline.pipeline.printable import printable_line
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.runtime.progress import Progress

ANSWER_TIMEOUT = 2.0  # seconds for the broker to answer
PATIENCE = 1.5  # seconds that a call or the script's own code may take before it is said what the run waits for


def ask(url: str, what: str) -> dict[str, Any] | None:
    """The facts of the broker's answer; None if it gives none."""
    try:
        with Client(url) as client:
            return client.ask(what, timeout=ANSWER_TIMEOUT)
    except (BrokerUnreachable, ValueError):
        return None


def waits_for(progress: Progress, url: str) -> str:
    """What a run has waited for longer than `PATIENCE`, as far as its script or its broker know; "" for nothing.
    `progress` is the script's."""
    if time() - progress.since < PATIENCE:
        return ""
    if not progress.waits:
        return f"the script {progress.said}"
    facts = ask(url, "why")
    return "the broker does not answer" if facts is None else printable_line(str(facts["text"]))


def worker_lines(url: str) -> list[str]:
    """What each worker is and does, as the broker knows it; nothing if there is no broker any more."""
    facts = ask(url, "status")
    return [] if facts is None else [_worker(row) for row in facts["workers"]]


def _worker(row: dict[str, Any]) -> str:
    stages = f"worker {row['index']}, stage {', '.join(map(str, row['stages']))}"
    process = f", process {row['pid']} on {row['host']}" if "pid" in row else ""
    return printable_line(f"{stages}{process}: {row.get('now') or row['standing']}")
