"""Placements in which stages loop over the workers: worker r of P owns r, P + r, 2P + r, ..."""

from stageline.pipeline.schedule.shape import Shape


def check_looped(shape: Shape) -> None:
    """Raises `ScheduleRefused` unless the stages loop over the workers."""
    placement = [sorted(stages) for stages in shape.placement]
    looped = [list(range(worker, shape.stages, shape.workers)) for worker in range(shape.workers)]
    multiple = shape.stages % shape.workers == 0
    if not multiple or placement != looped:
        way_out = f"place the stages as {looped}" if multiple else f"use a multiple of {shape.workers} stages"
        raise shape.refused(
            f"its stages must loop over the workers (worker r of P owns r, P + r, ...); {way_out}, or use 1f1b"
        )
