"""Defines the supervisor's waiting times, on a slice and on this machine."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Waiting times of a supervisor, in seconds.

    The backoffs of consecutive restarts add up to more than the other processes of the
    job take to notice that one has died (`multihost.HostsConfig.heartbeat_seconds`),
    because until then it cannot rejoin them.

    Attributes:
      restarts: number of consecutive restarts without progress, and of further requests
        to a store that refuses.
      backoff: wait before the first restart, doubled before each further one without
        progress.
      longest_backoff: upper bound of the backoff.
      stopping: wait for a command that was asked to end, and saves.
      ended: wait before restarting a command that ended with code 0 while the role is
        not done, to leave the first worker time to mark it.
      report: interval of reports.
      last_report: longest wait for the last report, if the store is unavailable.
      hurried_report: the same if the machine is about to be taken away, or if the model
        directory or the command cannot be used; also the interval of attempts at the
        last report.
      retry: interval of requests to an unavailable store.
      poll: interval of checks of the command.
    """

    restarts: int = 3
    backoff: float = 20.0
    longest_backoff: float = 300.0
    stopping: float = 60.0
    ended: float = 60.0
    report: float = 60.0
    last_report: float = 600.0
    hurried_report: float = 10.0
    retry: float = 10.0
    poll: float = 0.5


LOCAL_PACE = Timeouts(
    backoff=1.0,
    longest_backoff=30.0,
    ended=5.0,
    report=2.0,
    last_report=30.0,
    hurried_report=5.0,
    retry=2.0,
    poll=0.1,
)
"""Waiting times on one machine, where the store is local and start-up takes seconds."""
