"""Compares projections of an encoder by how well queries find their documents.

    python -m bench.projections CORPUS --queries queries.jsonl [--qrels test.tsv] \\
        --weights FOLDER [FOLDER ...] [--page PAGE --place NAME]

CORPUS is one that `realm adapt` has prepared, and the encoders are folders as it takes
them in `--weights`, of the corpus's vocabulary. Nothing is trained: a projection is
what a run begins with. Differences from the encoder without one, by the cosine, are
paired by query, with a 95 % interval.
"""

import dataclasses
import pathlib

import jax
import numpy as np

from bench.command import (
    command_line,
    make_parser,
    one_line_errors,
    publish,
    require_room,
)
from bench.machine import machine, today
from bench.tables import table
from realm_jax.answering.search import embed_questions
from realm_jax.data.blocks import BlockStore
from realm_jax.data.judgements import read_judgements
from realm_jax.evaluation import adaptation
from realm_jax.index.embed import EmbedConfig
from realm_jax.metrics.retrieval import bootstrap_interval, paired_bootstrap_difference
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import DOCUMENT_TOWER, Retriever
from realm_jax.training.initialization import initial_params, warm_start_params
from realm_jax.training.projection import (
    Projection,
    document_features,
    fit_projection,
    unprojected,
)
from realm_jax.types import Lengths
from realm_jax.weights.published import read_published

METRIC = "nDCG@10"
LENGTHS = Lengths(query=64, document=96, joined=112)
LABELS = {
    Projection.PCA: "principal components",
    Projection.LDA: "linear discriminants",
}
_EMBED = EmbedConfig(document_length=LENGTHS.document)


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("corpus", metavar="CORPUS", help="a corpus")
    parser.add_argument("--queries", required=True, help="queries to measure with")
    parser.add_argument("--qrels", default="", help="their judgements")
    parser.add_argument("--weights", nargs="+", required=True, help="encoders")
    parser.add_argument("--width", type=int, default=128, help="features to keep")
    parser.add_argument("--place", default="", help="which of the page's tables it is")
    flags = parser.parse_args()
    name = "-".join(filter(None, ["projections", flags.place]))
    require_room(name, flags)
    corpus = BlockStore.open(flags.corpus)
    sources = {text.source_id for text in corpus.texts(np.arange(corpus.num_blocks))}
    queries = read_judgements(flags.queries, flags.qrels, sources)
    probe = adaptation.queries_probe(corpus, queries, LENGTHS.query)
    rows = []
    for folder in flags.weights:
        measured = Encoder(folder, flags.width, corpus).measure(probe)
        first = next(iter(measured.values()))
        for label, values in measured.items():
            change = paired_bootstrap_difference(first, values).percent("+.1f")
            mean = bootstrap_interval(values).percent()
            place = pathlib.Path(folder).name
            rows.append([place, label, mean, "" if values is first else change])
            print(*rows[-1], flush=True)
    names = {"CORPUS": flags.corpus, "QUERIES": flags.queries, "QRELS": flags.qrels}
    names |= {pathlib.Path(place).name.upper(): place for place in flags.weights}
    heads = [f"{len(queries)} queries", "projection", METRIC, "change"]
    text = (
        f"    {command_line('projections', names)}\n\n{table(heads, rows)}\n\n"
        f"{today()}, {machine()}; {corpus.num_blocks:,} blocks."
    )
    publish(name, text, rows, flags)


class Encoder:
    """A published encoder with two towers."""

    def __init__(self, folder: str, width: int, corpus: BlockStore):
        self._config = dataclasses.replace(
            read_published(folder).retriever,
            projection_size=width,
            projected=True,
            shared=False,
        )
        models = Retriever(self._config), KnowledgeEncoder(self._config.bert)
        drawn, _ = initial_params(*models, LENGTHS, seed=0)
        self._params = warm_start_params(
            drawn, folder, self._config, corpus.vocabulary
        )["retriever"]
        self._corpus = corpus

    def measure(self, probe: adaptation.Probe) -> dict[str, np.ndarray]:
        """Returns the values of the queries by projection, without one first."""
        config, everything = self._config, range(len(probe.texts))
        tower, blocks = self._params[DOCUMENT_TOWER], np.arange(self._corpus.num_blocks)
        features = document_features(tower, config, self._corpus, blocks, _EMBED)
        queries = embed_questions(*unprojected(tower, config), probe.ids)
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        scores = {"none": queries @ (features / lengths).T}
        for kind, label in LABELS.items():
            fitted = fit_projection(
                self._params, config, self._corpus, _EMBED, kind, LENGTHS.query
            )[DOCUMENT_TOWER]["projection"]
            x, z = (
                jax.nn.standardize(
                    rows @ fitted["kernel"] + fitted["bias"], epsilon=1e-12
                )
                for rows in (queries, features)
            )
            scores[label] = np.asarray(x @ z.T)
        return {
            label: probe.judge(of, everything)[METRIC] for label, of in scores.items()
        }


if __name__ == "__main__":
    with one_line_errors():
        main()
