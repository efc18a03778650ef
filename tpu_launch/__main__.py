"""Plans a run, and has it run: by this machine, or by an engine of Google Cloud.

    python -m tpu_launch plan --gin_file=...     what a run needs, takes and costs
    python -m tpu_launch local --gin_file=...    a chain of stages on this machine
    python -m tpu_launch up --gin_file=...       a run on GKE or on TPU VMs
    python -m tpu_launch status --gin_file=...   how that run is
    python -m tpu_launch logs --gin_file=...     what its workers write
    python -m tpu_launch down --gin_file=...     deletes everything of a run

`python -m tpu_launch COMMAND --help` describes a command.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence

from realm_jax.cli.main import guard
from realm_jax.errors import BAD_INPUT, BadInputError
from tpu_launch import local, logs, plan, status, up

_COMMANDS: dict[str, Callable[[Sequence[str], threading.Event], int]] = {
    "plan": plan.main,
    "local": local.main,
    "up": up.up,
    "status": status.main,
    "logs": logs.main,
    "down": up.down,
}


def main(argv: Sequence[str]) -> int:
    """Runs a command and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else BAD_INPUT

    def command(stop: threading.Event) -> int | None:
        if argv[0] not in _COMMANDS:
            raise BadInputError(
                f"unknown command {argv[0]!r}; expected one of {', '.join(_COMMANDS)}"
            )
        code = _COMMANDS[argv[0]](argv[1:], stop)
        # After a signal, the exit code is the signal's.
        return None if stop.is_set() else code

    return guard(command)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A compiler whose plan was interrupted still runs, in its own thread.
    os._exit(code)
