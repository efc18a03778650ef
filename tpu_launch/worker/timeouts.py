"""How long a supervisor waits for what: on a slice, and on this machine."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long a supervisor waits for what, in seconds.

    The restarts in a row last longer than the others of the job take to notice that
    one has died (`multihost.HostsConfig.heartbeat_seconds`), for until then it cannot
    join them.

    Attributes:
      restarts: how often in a row it starts again without having got further, and asks
        a store again that refuses.
      backoff: before the first restart; twice as long before each further one that
        follows without progress.
      longest_backoff: it grows no longer.
      stopping: for a command that saves because it was asked to end.
      ended: before a command is started again that has ended well while the role is
        not done: so long the first worker may take to mark it.
      report: between two reports.
      last_report: for the last one, while the store is away.
      hurried_report: the same where the machine is about to go; between two tries.
      retry: between two questions to a store that is away.
      poll: between two looks at the command.
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


LOCAL_PACE = Pace(
    backoff=1.0,
    longest_backoff=30.0,
    ended=5.0,
    report=2.0,
    last_report=30.0,
    hurried_report=5.0,
    retry=2.0,
    poll=0.1,
)
"""Of processes of one machine, whose store is near and who are started in seconds."""
