"""What all tests share."""

from hypothesis import HealthCheck, settings

# No deadline, no check for slowness: how long an example takes says something about the machine, nothing about the code.
settings.register_profile("stageline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stageline")
