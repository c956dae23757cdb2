"""Notices that nobody computes: every worker waits for another one's message, and none arrives.

A lease is for a worker that should compute and does not. One that waits is not to blame; when all wait, the messages
are, or the way that they should take.
"""

from collections.abc import Iterable

from stageline.broker.control.protocol import WAITS

from .member import Member, MemberStatus

LEASES, LEAST = 6, 60.0  # a standstill ends the run after that many leases, and not before that many seconds


class Standstill:
    """`lease` in seconds; the time is whoever asks' to tell."""

    def __init__(self, lease: float) -> None:
        self.bound = max(LEAST, LEASES * lease)
        self._actions = -1
        self._since = 0.0

    def lasts(self, members: Iterable[Member], now: float) -> float:
        """For how many seconds all have been waiting; 0 if somebody computes, has computed, or has yet to report."""
        reports = [member.report for member in members if member.standing is MemberStatus.PRESENT]
        waiting = [report for report in reports if report is not None and report.now.startswith(WAITS)]
        actions = sum(report.actions for report in waiting)
        if not reports or len(waiting) < len(reports) or actions != self._actions:
            self._actions, self._since = actions, now
        return now - self._since
