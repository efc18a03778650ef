"""Workers of a role that lose no time."""

import threading

from tpu_launch.processes import Pace
from tpu_launch.roles import Worker
from tpu_launch.run import TRAINER

AT_ONCE = Pace(
    backoff=0.0, longest_backoff=0.0, waiting=0.0, saving=30.0, settling=5.0, poll=0.01
)


def make_worker(store, commands, role=TRAINER, stop=None, **settings):
    """A worker; while its commands run, it looks at nothing."""
    given = {"max_restarts": 2, "pace": AT_ONCE, "look_seconds": 60.0, **settings}
    stop = stop or threading.Event()
    return Worker(store, role, commands, stop, print, **given)
