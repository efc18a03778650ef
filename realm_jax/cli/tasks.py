"""Lists the registered SeqIO tasks, or prints examples as the model sees them.

Without NAME, prints all tasks and mixtures with their splits and sizes: the
blocks that examples are made from, and the examples that `realm prepare` wrote.
With --show, prints the first examples as text: [MASK] where the model sees it,
answers and spans in brackets. Tasks come from --corpus, --questions and your
modules.

Example:
  realm tasks --corpus=runs/my/corpus --name=my
  realm tasks my_salient --show=3 --corpus=runs/my/corpus --name=my
  realm tasks my_years --show=5 --split=validation --import_module=my_tasks
"""

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.extras import require_extra

_BOLD, _PLAIN = "\x1b[1;33m", "\x1b[0m"


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    _check(flags)
    require_extra("prepare", "realm tasks")
    # As in `prepare`: TensorFlow reports every accelerator that it does not find.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for line in _lines(flags):
        if stop.is_set():
            raise StoppedError("stopped")
        print(line)


def _parser() -> argparse.ArgumentParser:
    parser = configuration.make_plain_parser("realm tasks", __doc__)
    parser.add_argument("task", nargs="?", metavar="NAME", help="a task or mixture")
    parser.add_argument(
        "--show", type=int, metavar="N", help="print the first N examples of NAME"
    )
    parser.add_argument(
        "--split", default="", help="of the examples; by default train if there is one"
    )
    parser.add_argument(
        "--corpus", metavar="DIR", help="register this prepared corpus, with --name"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="of the corpus: its tasks are NAME_salient, …"
    )
    parser.add_argument(
        "--questions",
        metavar="FILE",
        help="register this file of questions as NAME_questions, with --corpus",
    )
    configuration.add_import_module(parser)
    return parser


def _check(flags: argparse.Namespace) -> None:
    if (flags.corpus is None) != (flags.name is None):
        given, missing = (
            ("--corpus", "--name") if flags.corpus else ("--name", "--corpus")
        )
        raise BadInputError(
            f"expected --corpus and --name together, got {given} alone; add {missing}"
        )
    if flags.questions is not None and flags.corpus is None:
        raise BadInputError(
            "expected --questions with the --corpus they are asked of, got none; add "
            "--corpus and --name"
        )
    if flags.show is None and flags.split:
        raise BadInputError(
            "expected --split with --show, got it alone; add --show=3 and a task"
        )
    if flags.show is None:
        return
    if flags.show < 1:
        raise BadInputError(
            f"expected at least 1 example to --show, got {flags.show}; raise it"
        )
    if flags.task is None:
        raise BadInputError(
            "expected the name of a task to --show, got none; `realm tasks` with the "
            "same flags and without --show lists them"
        )


def _lines(flags: argparse.Namespace) -> Iterator[str]:
    from realm_jax.prepare import inspect

    _register(flags)
    if flags.show is None:
        rows = inspect.summaries(None if flags.task is None else [flags.task])
        if not rows:
            raise BadInputError(
                "expected tasks to list, but none is registered; add --corpus and "
                "--name, or --import_module"
            )
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for task, split, content in rows:
            yield f"{task:<{widths[0]}}  {split:<{widths[1]}}  {content}"
        return
    is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    mark = _in_colour if is_terminal else str
    shown = inspect.show(flags.task, flags.split, flags.show, mark)
    for number, lines in enumerate(shown):
        if number:
            yield ""
        yield from lines


def _register(flags: argparse.Namespace) -> None:
    from realm_jax.data.blocks import BlockStore
    from realm_jax.data.questions import read_questions
    from realm_jax.prepare import inspect, seqio_tasks

    configuration.import_modules(flags)
    if flags.corpus is None:
        return
    inspect.register_prepared(flags.name, flags.corpus)
    if flags.questions is not None:
        vocabulary = BlockStore.open(flags.corpus).vocabulary
        seqio_tasks.register_question_task(
            f"{flags.name}_questions", read_questions(flags.questions), vocabulary
        )


def _in_colour(text: str) -> str:
    return f"{_BOLD}{text}{_PLAIN}"
