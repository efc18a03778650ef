"""Writes a chain file for a text of yours, with sizes that fit text and machine.

The chain prepares the text, teaches a reader, trains retriever and reader together,
fine-tunes on your questions and measures the result. Without questions it ends before
fine-tuning, with a retriever for `realm search`. Questions without a split get one:
70 % train, 10 % dev, 20 % test.
From few documents and questions a reader learns little: with --start the chain goes
on from a trained model, such as the quickstart's.

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
from typing import TYPE_CHECKING

from realm_jax.cli import configuration, recorded_run
from realm_jax.errors import BadInputError

if TYPE_CHECKING:
    from realm_jax.prepare.encoder_start import EncoderStart
    from realm_jax.prepare.first_chain import TrainedModel

CHAIN_NAME = "chain.gin"
# Layers and width of the model that gin/runs/quickstart.gin trains.
_MINILM_SIZE = (6, 384)
_ENCODER_SETTINGS = ("width", "query_prompt", "document_prompt")


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    from realm_jax.data.tokenizer_files import load_vocabulary
    from realm_jax.prepare import first_chain
    from realm_jax.prepare.prepare import require_task_name
    from realm_jax.prepare.text_sample import TextSample, choose_masks, require_pairs

    flags = _parser().parse_args(argv)
    if not flags.folder:
        raise BadInputError("expected a folder, got an empty text; name one")
    folder = pathlib.Path(flags.folder)
    path = folder / CHAIN_NAME
    if path.exists():
        raise BadInputError(
            f"expected a folder without {CHAIN_NAME}, got {folder}; delete the file to "
            "write it anew, or give another folder"
        )
    name = flags.name or corpus_name(folder)
    require_task_name(name)
    sample = TextSample.read(flags.source, stop)
    text = first_chain.measure_text(flags.source, sample)
    masks = choose_masks(sample, text.validation_fraction, flags.masks)
    questions = flags.questions and first_chain.Questions.read(flags.questions)
    start = _trained_model(flags.start) if flags.start else None
    encoder = None if start else read_encoder_start(flags)
    file = encoder.vocabulary_file if encoder else start and start.vocabulary
    fit = None
    if file:
        fit = sample.fit(encoder.vocabulary if encoder else load_vocabulary(file))
        try:
            first_chain.require_known(fit, file)
            text = dataclasses.replace(
                text, characters_per_piece=fit.characters_per_piece
            )
        except BadInputError:
            if start or flags.weights is not None:
                raise
            encoder = None
    if not (encoder or start):
        require_pairs(sample)
    if questions and questions.are_new:
        questions = dataclasses.replace(
            questions, path=os.fspath(folder / "questions.jsonl")
        )
    chain = first_chain.FirstChain(
        root=os.fspath(folder),
        name=name,
        source=flags.source,
        text=text,
        masks=masks,
        questions=questions or None,
        encoder=encoder,
        start=start,
        fit=fit,
    )
    folder.mkdir(parents=True, exist_ok=True)
    if questions and questions.are_new:
        questions.write()
    path.write_text(chain.gin_file())
    for line in chain.description():
        print(line)
    print(f"wrote {path}; now run")
    print(f"  python -m tpu_launch local --gin_file={path}")
    words = " --hybrid" if chain.is_searched_by_words else ""
    if questions:
        print(f'  realm ask {folder} "your question"{words}')
    elif start:
        other = f"--corpus={folder}/corpus --allow_corpus_mismatch"
        print(f'  realm ask {start.model_dir} {other} "your question"{words}')
    else:
        print(f'  realm search {folder} "your query"{words}')


def _trained_model(run: str) -> "TrainedModel":
    """Returns the model of a run that has the quickstart's size."""
    from realm_jax.evaluation.recorded import find_corpus, find_model
    from realm_jax.models.retriever import OF_SENTENCE_ENCODERS
    from realm_jax.prepare.first_chain import TrainedModel

    if "://" not in run and not pathlib.Path(run).exists():
        raise BadInputError(
            f"expected a finished quickstart in --start, got {run}, which does not "
            "exist; run `make quickstart` first, or leave --start out"
        )
    recorded = find_model(run)
    corpus, _ = find_corpus(recorded, option="a run whose corpus is there")
    model_dir, model = recorded.model_dir, recorded.trained.model
    found = (model["bert"]["num_layers"], model["bert"]["hidden_size"])
    # Without a projection or with a prompt it is another model, of any size.
    others = sorted(set(OF_SENTENCE_ENCODERS) & model.keys())
    if found != _MINILM_SIZE or others:
        settings = f" with {', '.join(others)}" if others else ""
        raise BadInputError(
            f"expected a model of the quickstart's size (6 layers of 384) in "
            f"{model_dir}, got {found[0]} of {found[1]}{settings}; write the chain "
            "file of another one by hand, as gin/runs/quickstart.gin is"
        )
    return TrainedModel(model_dir, f"{corpus}/vocab.txt")


def _parser() -> argparse.ArgumentParser:
    from realm_jax.prepare.text_sample import MASKS

    parser = configuration.make_plain_parser("realm init", __doc__)
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
        "--masks",
        default="",
        choices=MASKS,
        help="what is masked in sentences: names and dates, terms by tf-idf, or random "
        "runs of words or wordpieces; by default the first of these that the text has",
    )
    parser.add_argument(
        "--name", default="", help="of the corpus; by default that of the folder"
    )
    add_encoder_flags(
        parser,
        "by default MiniLM's, if `make data` has fetched it; '' for none",
    )
    parser.add_argument(
        "--start",
        default="",
        metavar="RUN",
        help="a finished quickstart, or a chain like it, to go on from: its model is "
        "fine-tuned on your questions and searches your text",
    )
    return parser


def corpus_name(folder: pathlib.Path) -> str:
    """Returns the folder's name as that of a corpus; of its letters, those of ASCII."""
    name = re.sub(r"\W+", "_", folder.resolve().name, flags=re.ASCII)
    name = name.strip("_").lower()
    return name if name[:1].isalpha() else f"corpus_{name}".rstrip("_")


def add_encoder_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the options of the encoder to start with; `default` says which it is."""
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
        "alone. Fewer than the encoder has are a projection fitted to the text",
    )
    for kind, example in (("query", "query: "), ("document", "passage: ")):
        parser.add_argument(
            f"--{kind}_prompt",
            metavar="TEXT",
            help=f"what the encoder reads in front of each {kind}, such as '{example}' "
            "of e5; by default what its folder says",
        )


def read_encoder_start(flags: argparse.Namespace) -> "EncoderStart | None":
    """Reads the encoder that the options name, or MiniLM; None without either."""
    from realm_jax.prepare.encoder_start import EncoderStart, find_weights

    given = {name: getattr(flags, name) for name in _ENCODER_SETTINGS}
    if folder := find_weights(flags.weights):
        return EncoderStart.read(folder, **given)
    for name, value in given.items():
        if value is not None:
            raise BadInputError(
                f"expected --weights=FOLDER beside --{name}, got none; give an encoder"
            )
    return None
