"""Parses `realm COMMAND RUN`: a run that records what gin files would say of it.

Gin files in place of RUN work as in every other command.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError

if TYPE_CHECKING:
    from realm_jax.evaluation.recorded import Overrides

# Options that have nothing to do with how a model is found.
_WITH_GIN = ("gin_file", "gin_help_only", "import_module", "json")


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of RUN, of what can be said of a run, and of gin files."""
    parser = configuration.make_parser(command, description)
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="a chain or a model"
    )
    add_options(parser)
    add_answering_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what can be said of a run beside its folder; `given` reads it."""
    for name, metavar, text in (
        ("corpus", "FOLDER", "the corpus that was trained on, or a later version"),
        ("pretrained", "FOLDER", "the run that the model was fine-tuned from"),
        ("searcher", "NAME", "device (exact) or scann, if not as in training"),
    ):
        parser.add_argument(f"--{name}", default="", metavar=metavar, help=text)
    parser.add_argument(
        "--allow_corpus_mismatch",
        action="store_true",
        help="any corpus of the model's vocabulary will do",
    )


def add_answering_options(parser: argparse.ArgumentParser) -> None:
    """Adds what changes answers alone; `given` reads it."""
    parser.add_argument(
        "--num_read",
        type=whole_number,
        metavar="N",
        help="blocks read per question, for a run that does not record it",
    )
    parser.add_argument(
        "--retrieval_weight",
        type=float,
        metavar="X",
        help="factor of the retriever's score in an answer, if not the recorded one",
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; configures gin if it has gin files and no RUN."""
    if configuration.names_gin(argv):
        words = [word for word in argv if not word.startswith("--gin.")]
        _require_gin_alone(parser, parser.parse_known_args(words)[0])
        return configuration.parse(parser, argv, parser.prog.removeprefix("realm "))
    flags = parser.parse_intermixed_args(argv)
    if not flags.run:
        parser.error("expected a RUN, such as runs/quickstart, or --gin_file, got none")
    configuration.import_modules(flags)
    return flags


def whole_number(text: str) -> int:
    """Returns the number, of at least 0, that an option is given as."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 0, got {text!r}"
        )
    return int(text)


def given(flags: argparse.Namespace) -> "Overrides":
    """Returns what the command line says of a run."""
    # Imported here, for commands that only show their help.
    from realm_jax.evaluation.recorded import Overrides

    names = [field.name for field in dataclasses.fields(Overrides)]
    return Overrides(**{name: getattr(flags, name) for name in names if name in flags})


def _require_gin_alone(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> None:
    for name, value in vars(flags).items():
        if name not in _WITH_GIN and value != parser.get_default(name):
            raise BadInputError(
                f"expected a RUN or gin files, got both ({name} {value!r}); with gin "
                f"files set macros, see {parser.prog} --help"
            )
