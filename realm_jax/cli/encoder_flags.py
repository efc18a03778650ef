"""The options of commands that start with a published encoder."""

import argparse
from typing import TYPE_CHECKING

from realm_jax.cli import recorded_run
from realm_jax.errors import BadInputError

if TYPE_CHECKING:
    from realm_jax.prepare.encoder_start import EncoderStart

_SETTINGS = ("width", "query_prompt", "document_prompt")


def add(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the options to a parser; `default` says what starts without --weights."""
    parser.add_argument(
        "--weights",
        metavar="FOLDER",
        help="the encoder to start with: a BERT, alone or in the layout of "
        f"sentence-transformers; {default}",
    )
    parser.add_argument(
        "--width",
        type=recorded_run.whole_number,
        metavar="N",
        help="features of an embedding; by default the encoder's own, or 128 of a BERT "
        "alone. Fewer than the encoder has are their principal components",
    )
    for kind, example in (("query", "query: "), ("document", "passage: ")):
        parser.add_argument(
            f"--{kind}_prompt",
            metavar="TEXT",
            help=f"what the encoder reads in front of each {kind}, such as '{example}' "
            "of e5; by default what its folder says",
        )


def read_start(flags: argparse.Namespace) -> "EncoderStart | None":
    """Reads the encoder that the options name, or MiniLM; None without either."""
    from realm_jax.prepare.encoder_start import EncoderStart, find_weights

    given = {name: getattr(flags, name) for name in _SETTINGS}
    if folder := find_weights(flags.weights):
        return EncoderStart.read(folder, **given)
    for name, value in given.items():
        if value is not None:
            raise BadInputError(
                f"expected --weights=FOLDER beside --{name}, got none; give an encoder"
            )
    return None
