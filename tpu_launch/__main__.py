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

from realm_jax.cli import configuration
from realm_jax.cli.main import guard
from realm_jax.errors import BadInputError
from tpu_launch import local, logs, plan, status, up

_BAD_INPUT = 2


def main(argv: Sequence[str]) -> int:
    """Runs a command and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else _BAD_INPUT
    code = 0

    def command(stop: threading.Event) -> None:
        nonlocal code
        if argv[0] not in _COMMANDS:
            raise BadInputError(
                f"unknown command {argv[0]!r}; expected one of {', '.join(_COMMANDS)}"
            )
        code = _COMMANDS[argv[0]](argv[1:], stop)

    return guard(command) or code


def _local(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs a chain of stages on this machine.

    The gin file binds `local.Chain` (see gin/runs/quickstart.gin) and is passed to
    every stage, as are --gin.BINDING=VALUE and --import_module. Ctrl-C stops all
    processes at a safe point; the same command resumes later.
    """
    parser = configuration.make_parser("python -m tpu_launch local", _local.__doc__)
    parser.add_argument(
        "--dry_run", action="store_true", help="print what would be done; do nothing"
    )
    flags, _ = configuration.parse_chain(parser, argv)
    chain = configuration.configured(local.Chain)
    passed_on = [f"--gin.{binding}" for binding in flags.bindings]
    passed_on += [f"--import_module={module}" for module in flags.import_module]
    runner = local.Runner(chain, flags.gin_file, stop, passed_on)
    if flags.dry_run:
        runner.describe()
        return 0
    return runner.run()


_COMMANDS: dict[str, Callable[[Sequence[str], threading.Event], int]] = {
    "plan": plan.main,
    "local": _local,
    "up": up.up,
    "status": status.main,
    "logs": logs.main,
    "down": up.down,
}

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A compiler whose plan was interrupted still runs, in its own thread.
    os._exit(code)
