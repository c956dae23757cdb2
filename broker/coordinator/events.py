"""What the broker has to say to whoever reads its log, and how often something odd has happened."""

from collections import Counter

_TOLD = 20  # oddities of one kind that become warnings; all are counted


class EventLog:
    """Whoever reads `news` and `warnings` clears them."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.warnings: list[str] = []
        self.oddities: Counter[str] = Counter()

    def tell(self, news: str) -> None:
        self.news.append(news)

    def warn(self, warning: str) -> None:
        self.warnings.append(warning)

    def odd(self, kind: str, what: str) -> None:
        """Something happened that is nobody's intention and does no harm."""
        self.oddities[kind] += 1
        if self.oddities[kind] <= _TOLD:
            self.warn(what)
