"""What all tests share."""

from hypothesis import settings

# No deadline: how long an example takes says something about the machine, nothing about the code.
settings.register_profile("stageline", deadline=None)
settings.load_profile("stageline")
