"""The coordinator's log lines, collected for the server to write, and counts of anomalies."""

from collections import Counter

_LOGGED = 20  # anomalies of one kind that become warnings; all are counted


class EventLog:
    """Lines since the reader last cleared them, and how often each kind of anomaly happened."""

    def __init__(self) -> None:
        self.infos: list[str] = []
        self.warnings: list[str] = []
        self.anomalies: Counter[str] = Counter()

    def info(self, line: str) -> None:
        self.infos.append(line)

    def warn(self, line: str) -> None:
        self.warnings.append(line)

    def count(self, kind: str, line: str) -> None:
        """Something unexpected and harmless happened: counted, and logged the first times."""
        self.anomalies[kind] += 1
        if self.anomalies[kind] <= _LOGGED:
            self.warn(line)
