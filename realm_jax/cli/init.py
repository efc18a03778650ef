"""Writes a chain file for a text of yours, with sizes that fit text and machine.

The chain prepares the text, teaches a reader, trains retriever and reader together,
fine-tunes on your questions and measures the result. Without questions it ends before
fine-tuning. Questions without a split get one: 70 % train, 10 % dev, 20 % test.

Example:
  realm init runs/my --source=articles.jsonl --questions=questions.jsonl
  python -m tpu_launch local --gin_file=runs/my/chain.gin
  realm ask runs/my "Who commissioned the Taj Mahal?"
"""

import argparse
import dataclasses
import os
import pathlib
import re
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError

CHAIN_NAME = "chain.gin"


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    from realm_jax.prepare import first_chain

    flags = _parser().parse_args(argv)
    folder = pathlib.Path(flags.folder)
    path = folder / CHAIN_NAME
    if path.exists():
        raise BadInputError(
            f"expected a folder without {CHAIN_NAME}, got {folder}; delete the file to "
            "write it anew, or give another folder"
        )
    text = first_chain.measure_text(flags.source, stop)
    questions = flags.questions and first_chain.Questions.read(flags.questions)
    weights = first_chain.find_weights(flags.weights)
    if questions and questions.are_new:
        questions = dataclasses.replace(
            questions, path=os.fspath(folder / "questions.jsonl")
        )
    chain = first_chain.FirstChain(
        root=os.fspath(folder),
        name=flags.name or _name_of(folder),
        source=flags.source,
        text=text,
        questions=questions or None,
        weights=weights,
    )
    folder.mkdir(parents=True, exist_ok=True)
    if questions and questions.are_new:
        questions.write()
    path.write_text(chain.gin_file())
    for line in chain.description():
        print(line)
    print(f"wrote {path}; now run")
    print(f"  python -m tpu_launch local --gin_file={path}")
    if questions:
        print(f'  realm ask {folder} "your question"')


def _parser() -> argparse.ArgumentParser:
    parser = configuration.Parser(
        prog="realm init",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", help="of the chain and its results")
    parser.add_argument(
        "--source",
        required=True,
        metavar="FILE",
        help="JSON lines with title and text, or another source that prepare reads",
    )
    parser.add_argument(
        "--questions",
        default="",
        metavar="FILE",
        help="JSON lines with question and answers",
    )
    parser.add_argument(
        "--name", default="", help="of the corpus; by default that of the folder"
    )
    parser.add_argument(
        "--weights",
        metavar="FOLDER",
        help="BERT weights to start from, such as MiniLM's, which `make data` fetches "
        "and which are found by themselves; '' for none",
    )
    return parser


def _name_of(folder: pathlib.Path) -> str:
    """Returns the folder's name as that of a corpus."""
    name = re.sub(r"\W+", "_", folder.resolve().name).strip("_").lower()
    return name if name and not name[0].isdigit() else f"corpus_{name}"
