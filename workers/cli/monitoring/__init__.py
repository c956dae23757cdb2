"""Beside a run: progress on stderr, stalls, a dashboard, Prometheus, OpenTelemetry.

May import `workers.cli` and what that may. Read first: `progress.py`.
"""
