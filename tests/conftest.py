"""What all tests share."""

from hypothesis import HealthCheck, settings

# No deadline and no limit on slowness: how long an example takes says something of the machine, nothing of the code.
settings.register_profile("stageline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stageline")
