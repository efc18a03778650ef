"""`python -m tpu_launch local --gin_file=...`: runs a chain of stages on this machine.

The gin file binds `local.Chain` (see gin/runs/quickstart.gin) and is given to every
stage, and so are --gin.BINDING=VALUE and --import_module. Ctrl-C stops all processes at
a safe point; the same command goes on later.
"""

import sys
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.cli.main import guard
from tpu_launch import local


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = configuration.make_parser("python -m tpu_launch", str(__doc__))
    parser.add_argument("command", choices=["local"], help="where to run")
    code = 0

    def command(stop: threading.Event) -> None:
        nonlocal code
        flags = configuration.parse(parser, argv)
        chain = configuration.configured(local.Chain)
        passed_on = [arg for arg in argv if arg.startswith("--gin.")]
        passed_on += [f"--import_module={module}" for module in flags.import_module]
        code = local.run(chain, flags.gin_file, stop, passed_on)

    return guard(command) or code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
