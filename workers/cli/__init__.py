"""The `stageline` command."""


def main() -> None:
    raise SystemExit("stageline: no command yet")
