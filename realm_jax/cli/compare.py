"""Compares two evaluated runs question by question; measures nothing again.

FIRST and SECOND are folders that `realm evaluate` has written, or files of
predictions (predictions.jsonl, predictions_control.jsonl), of the same
questions. The page shows each metric of both with the difference, SECOND minus
FIRST, and its paired 95 % interval; the settings, seeds, versions and
commits that differ, stage by stage; and the questions that one of them answers
and the other does not.

Example:
  realm compare runs/a/evaluate runs/b/evaluate --output=runs/a_b
  realm compare a/predictions_control.jsonl a/predictions.jsonl --output=a
"""

import argparse
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command; it takes seconds, so `stop` changes nothing."""
    flags = _parser().parse_args(argv)
    from realm_jax.evaluation import compare

    comparison = compare.compare_runs(
        compare.read_run(flags.first), compare.read_run(flags.second)
    )
    compare.write_comparison(comparison, flags.output)
    for line in compare.summary_lines(comparison):
        print(line)
    print(f"the comparison is in {flags.output}/{compare.HTML_NAME}")


def _parser() -> argparse.ArgumentParser:
    parser = configuration.make_plain_parser("realm compare", __doc__)
    parser.add_argument("first", metavar="FIRST", help="the run to compare with")
    parser.add_argument("second", metavar="SECOND", help="the other run")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder for compare.html"
    )
    return parser
