"""Writes a published Open-QA set as JSON lines, the QUESTIONS of the commands.

    python -m realm_jax.prepare.open_qa nq_open --source DIR --output nq_open.jsonl

SOURCE is a folder or a file, local or gs://, or `tfds:NAME`, or `tfds:NAME@FOLDER`.
The lines have ids and the splits train, dev and test, so `realm prepare`, `pretrain`
and `evaluate` read them without TensorFlow.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from realm_jax.data.questions import write_questions
from realm_jax.errors import BadInputError
from realm_jax.extras import require_extra


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        require_extra("prepare", "python -m realm_jax.prepare.open_qa")
    except BadInputError as error:
        print(error, file=sys.stderr)
        return 2
    # Imports TensorFlow, which takes seconds.
    from realm_jax.prepare.open_qa.sets import SETS, read_set

    parser = argparse.ArgumentParser(
        prog="python -m realm_jax.prepare.open_qa",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=list(SETS), help="the set")
    parser.add_argument("--source", required=True, help="folder, file or tfds:NAME")
    parser.add_argument("--output", required=True, help="JSON lines, local or gs://")
    options = parser.parse_args(arguments)
    try:
        questions = read_set(options.kind, options.source)
        write_questions(options.output, questions)
    except BadInputError as error:
        print(error, file=sys.stderr)
        return 2
    counts = Counter(question.split for question in questions)
    print(", ".join(f"{split}: {count:,}" for split, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
