"""Makes a model directory of published weights, on which the other commands run.

A SOURCE is the folder of a model of `transformers`: RealmEmbedder, RealmScorer,
RealmKnowledgeAugEncoder, RealmReader or RealmForOpenQA, as config.json with
model.safetensors or pytorch_model.bin; or a checkpoint of TensorFlow with the variables
of REALM, ORQA or BERT, also that of a TF-Hub module. Several become one model: an
embedder and an encoder what `realm pretrain` and `realm finetune` start from; a
RealmForOpenQA, which answers, and the embedder that its blocks were embedded with. A
BERT or a sentence encoder is a retriever and a reader at once.

With --corpus the blocks and embeddings that a model brings become a corpus and an index
of it. DEST has the vocabulary, too, to prepare another corpus with. Tensors that are
not used are listed, and so are those that a model does without.

Examples:
  realm import-weights google/realm-cc-news-pretrained-embedder \\
    google/realm-cc-news-pretrained-encoder runs/realm/pretrain
  realm import-weights google/realm-orqa-nq-openqa runs/realm/finetune \\
    --corpus=runs/realm/corpus
  realm import-weights cc_news_pretrained/embedder cc_news_pretrained/bert \\
    runs/realm/pretrain --corpus=runs/realm/corpus --blocks=blocks.tfr \\
    --embeddings=cc_news_pretrained/embedder/encoded/encoded.ckpt
"""

import argparse
import collections
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from realm_jax.cli import configuration

if TYPE_CHECKING:
    from realm_jax.training.imported import Imported

_OPTIONS = (
    ("corpus", "FOLDER", "the corpus to search; made of the blocks if it is new"),
    ("blocks", "FILE", "texts of the blocks, if not in SOURCE (block_records.npy)"),
    ("embeddings", "CHECKPOINT", "their embeddings, if not in SOURCE (encoded.ckpt)"),
    ("titles", "FILE", "their titles, a file of the same kind"),
    ("vocabulary", "FILE", "vocab.txt, if not in SOURCE"),
)


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    flags = _make_parser().parse_args(argv)
    from realm_jax.training.imported import ImportConfig, import_weights

    options = {name: getattr(flags, name) for name, _, _ in _OPTIONS}
    config = ImportConfig(flags.sources, flags.dest, **options)
    for line in _report(flags.dest, import_weights(config)):
        print(line)


def _make_parser() -> argparse.ArgumentParser:
    parser = configuration.make_plain_parser("realm import-weights", __doc__)
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a published model"
    )
    parser.add_argument("dest", metavar="DEST", help="a folder that is new or empty")
    for name, metavar, text in _OPTIONS:
        parser.add_argument(f"--{name}", default="", metavar=metavar, help=text)
    return parser


def _report(dest: str, imported: "Imported") -> Iterator[str]:
    for source, model in imported.models.items():
        yield f"{source}: {model.name}"
        yield from _listed("not used", model.unused)
        yield from _listed("missing and not needed", model.missing)
        if model.block_embeddings is not None and imported.index is None:
            yield "  not used: its embeddings of blocks; give --corpus for an index"
    if imported.index is not None:
        count, difference = imported.index.manifest.count, imported.index.difference
        agrees = "as" if imported.index.is_of_retriever else "not as"
        yield (
            f"index: {count:,} blocks, verified; embedded {agrees} the document tower "
            f"embeds them (a sample differs by {difference:.2g} of its length)"
        )
    yield f"wrote {dest}, as a run of `realm {imported.stage}`"


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    """Yields a line for the tensors of each module."""
    groups = collections.Counter(name.rpartition(".")[0] or name for name in names)
    for group, count in groups.items():
        yield f"  {what}: {group} ({count})"
