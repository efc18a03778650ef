"""Measures what REALM adds on real text, over several seeds and two starts.

    python -m bench.realm_gain --corpus CORPUS --questions QUESTIONS --weights MINILM \
        --work runs/realm_gain --output docs/figures/realm_gain.json

Two starting retrievers, both with MiniLM's encoder:

    strong   the mean over its wordpieces, projected to principal components; untrained
    weak     its [CLS], which was not trained for retrieval, projected at random, after
             a few updates of ICT, which is the paper's start

There is one reader for all, warm-started on masked sentences. Each seed has another
order of sentences and questions, and for the weak start another projection. With REALM,
`realm pretrain`'s updates and then fine-tuning; the control is fine-tuned from the
start. Recall is measured before and after fine-tuning, exact match after. Results are
kept, so that an interrupted run resumes, and the table is written after every seed.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.command import write_figures
from bench.machine import machine
from bench.minilm import (
    EMBED,
    LENGTHS,
    fill_in,
    holding_answer,
    load_searcher,
    models,
    optimizer,
    reader_config,
    restored,
)
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.evaluation.loading import FinetunedModel
from realm_jax.evaluation.open_qa import evaluate_open_qa
from realm_jax.index.source import IndexSource
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.metrics.retrieval import (
    bootstrap_interval,
    paired_bootstrap_difference,
)
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.index_metrics import HeldOutQuestions
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.warm_start import ReaderMixture, WarmStartConfig
from realm_jax.types import NULL_BLOCK

RECALL_AT = (1, 5, 20)
STARTS = ("strong", "weak")


@dataclasses.dataclass(frozen=True)
class Realm:
    """Settings of REALM's updates from a start.

    Attributes:
      num_candidates: documents per sentence, the null document included.
      learning_rate: learning rate of the reader.
      retriever_rate: factor on it for the retriever.
      own_block: whether a sentence's own block, without it, is a candidate.
    """

    steps: int
    batch_size: int
    num_candidates: int
    learning_rate: float
    retriever_rate: float
    normalization: str
    own_block: bool
    frozen: tuple[str, ...]


REALM: Mapping[str, Realm] = {
    # The quickstart's, with eight sentences instead of six and without a refresh.
    "strong": Realm(
        steps=24,
        batch_size=8,
        num_candidates=4,
        learning_rate=5e-5,
        retriever_rate=0.5,
        normalization="batch",
        own_block=True,
        frozen=(
            "retriever/query_tower",
            "retriever/document_tower/bert/token_embedding",
            "reader/bert/token_embedding",
        ),
    ),
    # Only the projection of the query tower: hardly any part of a step then has a
    # backward pass, and the same time is enough for many more sentences. Null document,
    # own block and two retrieved ones.
    "weak": Realm(
        steps=150,
        batch_size=64,
        num_candidates=4,
        learning_rate=1e-3,
        retriever_rate=1.0,
        normalization="batch",
        own_block=True,
        frozen=("reader", "retriever/document_tower", "retriever/query_tower/bert"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Study:
    """Inputs of the study, and the length of each stage.

    Attributes:
      corpus: corpus prepared in the vocabulary of the weights, with masked sentences
        and questions as examples.
      name: name of the corpus, the prefix of its tasks' names.
      split: split of the questions on which results are measured.
      reader_steps, ict_steps, finetune_steps: updates; no fine-tuning if 0.
      span_scorer, score_unmasked: whether the reader's warm start also trains
        fine-tuning's span scorer, and on wordpieces that are not masked.
    """

    corpus: str
    name: str
    questions: str
    split: str
    weights: str
    work: str
    reader_steps: int
    ict_steps: int
    finetune_steps: int
    span_scorer: bool
    score_unmasked: bool
    realm: Mapping[str, Realm]

    def models(self, start: str) -> ModelFactory:
        """Returns the models of a start."""
        return models(start, span_scorer=self.span_scorer)

    def folder(self, *parts: str) -> str:
        """Returns a folder below `work`."""
        return "/".join([self.work, *parts])


def train_reader(study: Study) -> str:
    """Returns the model directory of the reader that both starts begin with.

    It first learns to copy, from blocks that mostly contain the answer, and then to
    copy from those alone, because few of the blocks that a retriever finds help.
    """
    steps = study.reader_steps
    first = ReaderMixture(0.75, 0.1, 0.15)
    copying = _train_reader(study, "copying_reader", 4 * steps // 9, 5e-4, first)
    second = ReaderMixture(0.5, 0.1, 0.4)
    return _train_reader(study, "reader", steps - 4 * steps // 9, 4e-4, second, copying)


def _train_reader(
    study: Study,
    run: str,
    steps: int,
    learning_rate: float,
    mixture: ReaderMixture,
    source: str = "",
) -> str:
    config = reader_config(
        study.folder(run), study.corpus, study.name, study.weights, steps
    )
    config = dataclasses.replace(
        config,
        models=study.models("strong"),
        optimizer=optimizer(learning_rate, 1.0, 20),
        reader_warm_start=source,
        mixture=mixture,
        score_unmasked=study.score_unmasked,
        seed=1 if source else 0,
    )
    return _run(warm_start, config)


def make_start(study: Study, start: str, seed: int) -> str:
    """Returns the model directory of a start: a retriever and the reader."""
    strong = start == "strong"
    if strong:  # It has no random part.
        seed = 0
    config = WarmStartConfig(
        model_dir=study.folder(start, f"start_{seed}"),
        corpus=study.corpus,
        task=f"{study.name}_salient" if strong else "",
        pairs_task="" if strong else f"{study.name}_ict",
        train_steps=0 if strong else study.ict_steps,
        batch_size=32,
        models=study.models(start),
        optimizer=optimizer(1e-4, 1.0, 0 if strong else 5),
        retriever_warm_start=study.weights,
        reader_warm_start=train_reader(study),
        projection="pca" if strong else "random",
        spans="together",
        seed=seed,
        log_period=10,
        checkpoint_period=50,
    )
    return _run(warm_start, config)


def train_realm(study: Study, start: str, source: str, seed: int) -> str:
    """Returns the model directory of REALM's updates from a start."""
    realm = study.realm[start]
    config = PretrainConfig(
        model_dir=study.folder(start, f"realm_{seed}"),
        corpus=study.corpus,
        task=f"{study.name}_salient",
        train_steps=realm.steps,
        batch_size=realm.batch_size,
        num_candidates=realm.num_candidates,
        own_block=realm.own_block,
        normalization=realm.normalization,
        refresh_mode="off",
        models=study.models(start),
        optimizer=optimizer(realm.learning_rate, realm.retriever_rate, 5),
        warm_start=source,
        questions=study.questions,
        questions_split="dev",
        held_out_examples=100,
        frozen=realm.frozen,
        embeddings_from_index="retriever/document_tower" in realm.frozen,
        embed=EMBED,
        seed=seed,
        log_period=10,
        checkpoint_period=20,
    )
    return _run(pretrain, config)


def train_answers(study: Study, start: str, source: str, run: str, seed: int) -> str:
    """Returns the model directory of fine-tuning from a stage."""
    config = _finetune_config(study, start, study.folder(start, f"{run}_{seed}"))
    return _run(finetune, dataclasses.replace(config, warm_start=source, seed=seed))


def _finetune_config(study: Study, start: str, model_dir: str) -> FinetuneConfig:
    return FinetuneConfig(
        model_dir=model_dir,
        corpus=study.corpus,
        task=f"{study.name}_questions",
        train_steps=study.finetune_steps,
        batch_size=8,
        num_retrieved=100,
        num_read=3,
        models=study.models(start),
        optimizer=optimizer(3e-4, 0.1, 10),
        embed=EMBED,
        log_period=10,
        checkpoint_period=50,
    )


def _run(stage: Any, config: Any) -> str:
    """Trains, unless that is done, and returns the model directory."""
    report = functools.partial(_report, config.model_dir)
    stage.run(config, report, threading.Event())
    return config.model_dir


class Measures:
    """Measures every model on the same questions, with one value for each."""

    def __init__(self, study: Study):
        self._study = study
        self._store = BlockStore.open(study.corpus)
        self._questions = HeldOutQuestions(
            self._store, study.questions, study.split, LENGTHS.query
        )

    def recall(self, start: str, model_dir: str, *donors: str) -> dict[str, np.ndarray]:
        """Returns recall of a stage's retriever, over a copied or newly built index."""
        trained = restored(model_dir)
        config = models(start).retriever_config(self._store.vocabulary.size)
        params = trained.tree["retriever"]
        source = IndexSource(
            open_store(model_dir),
            self._store,
            config,
            EMBED,
            "device",
            donors=donors,
        )
        searcher = source.build(trained.step, params).searcher
        recalls = self._questions.recalls(config, params, searcher, RECALL_AT)
        return {f"recall@{k} before": hits for k, hits in recalls.items()}

    def signal(self, start: str, model_dir: str) -> dict[str, float]:
        """Returns how much documents help the reader, on which REALM's gradient rests.

        On training sentences, with the documents that a start's retriever finds: the
        share that contains the answer, and log p(y|z,x) - log p(y|null,x) of those that
        do and of those that do not. A document can help without the answer, and one
        that contains it may be about something else.
        """
        config = models(start).retriever_config(self._store.vocabulary.size)
        trained = restored(model_dir)
        searcher = load_searcher(model_dir, self._store, config, trained.step)
        spans = fill_in(
            config,
            trained.tree,
            self._store,
            self._study.name,
            "train",
            searcher,
            480,
        )
        found = spans.block_ids[:, 1:] != NULL_BLOCK
        holds = found & holding_answer(self._store, spans.block_ids[:, 1:], spans.batch)
        gain = spans.log_candidates[:, 1:] - spans.log_null[:, None]
        return {
            "documents with the answer": float(holds[found].mean()),
            "sentences with such a document": float(holds.any(axis=1).mean()),
            "gain of a document with the answer": float(gain[holds].mean()),
            "gain of one without": float(gain[found & ~holds].mean()),
            "entropy of p(z|x)": float(spans.retrieval_entropy.mean()),
        }

    def answers(self, start: str, model_dir: str) -> dict[str, np.ndarray]:
        """Returns recall and exact match of a fine-tuned model."""
        config = _finetune_config(self._study, start, model_dir)
        model = FinetunedModel.open(
            config, self._store, searcher="device", embed=config.embed
        )
        answered = evaluate_open_qa(
            model.corpus_search(self._store, model.index(self._store)),
            self._questions.questions,
            recall_at=RECALL_AT,
        )
        return {
            **{f"recall@{k} after": hits for k, hits in answered.recall.items()},
            "exact match": answered.exact_match,
        }


def run_seed(study: Study, measures: Measures, start: str, seed: int) -> dict:
    """Returns one value per question of both arms, kept in a file once measured."""
    path = pathlib.Path(study.folder(start, f"measured_{seed}.json"))
    settings = json.loads(json.dumps(dataclasses.asdict(study)))
    settings["realm"] = settings["realm"][start]
    if not path.exists():
        source = make_start(study, start, seed)
        # Before REALM, which copies the index that this builds.
        untrained = measures.recall(start, source)
        realm = train_realm(study, start, source, seed)
        arms = {}
        for arm, stage in {"realm": realm, "control": source}.items():
            before = untrained
            if arm == "realm":
                before = measures.recall(start, realm, source)
            after = {}
            if study.finetune_steps:
                tuned = train_answers(study, start, stage, f"{arm}_answers", seed)
                after = measures.answers(start, tuned)
            arms[arm] = {
                name: values.tolist() for name, values in (before | after).items()
            }
        arms["curve"] = [
            {
                name: line[name]
                for name in line
                if name in ("step", "loss", "retrieval_utility", "retrieval_entropy")
                or name.startswith(("held_out", "recall", "index_drift"))
            }
            for line in read_metrics(realm)
        ]
        path.write_text(json.dumps({"of": settings, **arms}))
    arms = json.loads(path.read_text())
    if (of := arms.pop("of", None)) != settings:
        raise BadInputError(
            f"expected figures of {settings} in {path}, got those of {of}; give "
            "another --work"
        )
    return arms


def summarise(by_seed: dict[int, dict]) -> dict:
    """Returns each arm and their paired difference, averaged over seeds by question."""
    names = next(iter(by_seed.values()))["realm"]
    table = {}
    for name in names:
        realm, control = (
            np.mean([arms[arm][name] for arms in by_seed.values()], axis=0)
            for arm in ("realm", "control")
        )
        table[name] = {
            "realm": dataclasses.asdict(bootstrap_interval(realm)),
            "control": dataclasses.asdict(bootstrap_interval(control)),
            "difference": dataclasses.asdict(
                paired_bootstrap_difference(control, realm)
            ),
            "by_seed": {
                seed: [float(np.mean(arms[arm][name])) for arm in ("realm", "control")]
                for seed, arms in by_seed.items()
            },
        }
    return table


def _report(
    name: str, step: int, total: int, values: Mapping[str, float], what: str = ""
) -> None:
    if values:
        shown = {
            key: round(value, 3)
            for key, value in values.items()
            if key in ("loss", "retrieval_utility", "reader_loss", "recall_at_5")
            or key in ("in_batch_accuracy", "held_out_utility", "retrieval_entropy")
        }
        print(time.strftime("%H:%M:%S"), name, f"{step}/{total}", shown, flush=True)


def main() -> None:
    """Runs everything that has not been measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("corpus", "questions", "weights", "work", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--name", default="vital")
    parser.add_argument("--split", default="test")
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--reader_steps", type=int, default=900)
    parser.add_argument("--ict_steps", type=int, default=40)
    parser.add_argument("--finetune_steps", type=int, default=60)
    parser.add_argument("--span_scorer", action="store_true")
    parser.add_argument("--score_unmasked", action="store_true")
    parser.add_argument(
        "--realm",
        type=json.loads,
        default={},
        help='what to change of REALM from every start, such as {"steps": 40}',
    )
    flags = vars(parser.parse_args())
    output, starts, seeds = (flags.pop(key) for key in ("output", "starts", "seeds"))
    changes = flags.pop("realm")
    realm = {start: dataclasses.replace(REALM[start], **changes) for start in starts}
    study = Study(realm=realm, **flags)
    measures = Measures(study)
    result: dict = {
        "settings": dataclasses.asdict(study) | {"corpus": "", "work": ""},
        "machine": machine(),
        "starts": {},
    }
    signals: dict[str, dict[str, float]] = {}
    by_start: dict[str, dict[int, dict]] = {start: {} for start in starts}
    for seed in range(seeds):
        for start in starts:
            by_start[start][seed] = run_seed(study, measures, start, seed)
            if start not in signals:
                start_dir = study.folder(start, "start_0")
                signals[start] = measures.signal(start, start_dir)
            result["starts"][start] = {
                "table": summarise(by_start[start]),
                "signal": signals[start],
                "curves": {s: arms["curve"] for s, arms in by_start[start].items()},
            }
            write_figures(output, result)


if __name__ == "__main__":
    main()
