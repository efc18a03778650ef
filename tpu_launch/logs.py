"""`python -m tpu_launch logs`: prints the output of the workers of a run.

Give it the flags of `up`, or --gin.MODEL_DIR=gs://my-bucket/my/pretrain alone. Each
line begins with role and worker. --follow continues with new lines until the run is
over or Ctrl-C. TPU VMs upload the last 256 KiB of their logs every minute.

Exit code 75: the model directory, or the engine, does not answer.
"""

import argparse
import os
import sys
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.errors import StoppedError
from realm_jax.storage import open_store
from tpu_launch import engines, records
from tpu_launch.run import BUILDER, TRAINER


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0.

    Raises:
      BadInputError: no MODEL_DIR is given, or no run was launched there.
      NotReadyError: the engine does not answer.
      UnavailableStoreError: the model directory does not answer.
      StoppedError: `stop` was set.
    """
    flags, model_dir = configuration.parse_for_macro(_parser(), argv, "MODEL_DIR")
    store = open_store(model_dir)
    record = records.read_record(store)
    lines = engines.lines(record, store, flags.role, flags.worker, flags.follow, stop)
    try:
        for who, line in lines:
            print(f"{who} | {line}", flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; discard further output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if stop.is_set():
        raise StoppedError("stopped reading; the run goes on")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = configuration.make_parser("python -m tpu_launch logs", __doc__)
    parser.add_argument("--role", choices=(TRAINER, BUILDER), help="only of this role")
    parser.add_argument("--worker", type=int, help="only of this worker")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="continue with new lines"
    )
    return parser
