"""Writes the models of a run for other software: the retriever, unless told otherwise.

RUN is the folder of a chain, such as runs/quickstart, or of one of its models; the
retriever is that of the last stage that is there, or what `realm adapt` has chosen.
`SentenceTransformer(DIR).encode` gives its embeddings. With two towers, or after
fine-tuning has changed the only one, DIR has two models, query/ and document/.
README.md in DIR is the model card.

--embeddings adds the embeddings of the corpus (embeddings.npy, float32) and, a line for
each row, their ids (ids.jsonl); --embeddings_format=parquet,faiss writes them for those
instead. docs/use_elsewhere.md shows what can be done with them.

--format=realm writes the REALM classes of `transformers` instead, of the last stage,
each in a folder, and --format=bert the reader alone, as a BERT with its masked-LM head.
docs/weights.md has both; `realm import-weights` reads them.

Examples:
  realm export runs/quickstart/pretrain --output=exported --embeddings
  realm export runs/quickstart/pretrain --output=exported --embeddings_format=faiss
  realm export runs/quickstart/pretrain --output=bert --format=bert
"""

import argparse
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration, recorded_run
from realm_jax.cli.standard_input import Notes
from realm_jax.evaluation.embedding_files import FORMATS, NPY

_SENTENCES = "sentence-transformers"


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command; an index that is being made ends at the next shard."""
    parser = _make_parser()
    flags = parser.parse_args(argv)
    configuration.import_modules(flags)
    if "://" in flags.output:
        parser.error(
            f"expected a local folder as --output, got {flags.output}; export to one, "
            "and copy it"
        )
    if flags.format != _SENTENCES:
        if flags.embeddings_format:
            parser.error(
                f"expected --format={_SENTENCES} with --embeddings_format, got "
                f"--format={flags.format}; leave one of them out"
            )
        _export_transformers(flags)
        return
    from realm_jax.evaluation.export import export_retriever

    models = export_retriever(
        flags.run,
        flags.output,
        recorded_run.given(flags),
        checkpoint=flags.checkpoint,
        embeddings=flags.embeddings_format or (NPY,) * flags.embeddings,
        stop=stop,
        note=Notes("export"),
    )
    for name in models:
        place = flags.output if name == "." else f"{flags.output.rstrip('/')}/{name}"
        print(f'wrote {place}: SentenceTransformer("{place}")')


def _export_transformers(flags: argparse.Namespace) -> None:
    from realm_jax.evaluation.export_transformers import export_transformers

    models = export_transformers(
        flags.run,
        flags.output,
        recorded_run.given(flags),
        flags.format,
        checkpoint=flags.checkpoint,
        embeddings=flags.embeddings,
    )
    for name in models:
        print(f"wrote {flags.output if name == '.' else f'{flags.output}/{name}'}")


def _formats(text: str) -> tuple[str, ...]:
    """Returns the names in a list with commas, each once."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := sorted(set(names) - set(FORMATS)):
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(FORMATS)}, got {unknown[0]!r}"
        )
    return names


def _make_parser() -> argparse.ArgumentParser:
    parser = configuration.make_plain_parser("realm export", __doc__)
    parser.add_argument("run", metavar="RUN", help="a chain or a model")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="a folder that is new or empty"
    )
    parser.add_argument(
        "--embeddings", action="store_true", help="write those of the corpus, too"
    )
    parser.add_argument(
        "--embeddings_format",
        type=_formats,
        default=(),
        metavar="FORMATS",
        help="--embeddings as some of npy, parquet and faiss, with commas between",
    )
    parser.add_argument(
        "--format",
        choices=(_SENTENCES, "realm", "bert"),
        default=_SENTENCES,
        help="for sentence-transformers, or as classes of transformers",
    )
    parser.add_argument(
        "--checkpoint",
        default="last",
        metavar="WHICH",
        help="last, or best by held-out utility, of a run that is not fine-tuned",
    )
    configuration.add_import_module(parser)
    recorded_run.add_options(parser)
    recorded_run.add_answering_options(parser)
    return parser
