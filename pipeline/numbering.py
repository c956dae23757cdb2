"""Numbers the microbatches of a run, and with them the messages of a queue: 0, 1, ... over all its steps."""


def message_number(step: int, microbatch: int, microbatches: int) -> int:
    """The number of `microbatch` of `step`, in a run with `microbatches` in each step."""
    return step * microbatches + microbatch


def message_place(number: int, microbatches: int) -> tuple[int, int]:
    """The step and the microbatch that have `number`."""
    return divmod(number, microbatches)
