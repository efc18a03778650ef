"""Measures a chain of stages and writes its report."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import StoppedError
from realm_jax.evaluation import report_data
from realm_jax.evaluation.curves import read_curves
from realm_jax.evaluation.masked_spans import (
    MaskedSpans,
    evaluate_masked_spans,
    masked_examples,
)
from realm_jax.evaluation.open_qa import (
    OpenQaEvaluation,
    evaluate_open_qa,
    predictions_as_lines,
    sample_answers,
)
from realm_jax.evaluation.report import write_report
from realm_jax.evaluation.report_data import ReportData
from realm_jax.evaluation.trained import FinetunedModel, open_finished
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import Searcher
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from realm_jax.training import pretrain, warm_start
from realm_jax.training.checkpoints import Restored
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.held_out import HeldOutQuestions
from realm_jax.training.index_link import IndexSource
from realm_jax.training.initialization import ModelFactory, describe
from realm_jax.training.metrics import read_metrics
from realm_jax.training.stage import open_examples
from realm_jax.training.state import count_parameters

PREDICTIONS_NAME = "predictions.jsonl"
RECALL_AT = (1, 5, 20)
_NUM_EXAMPLES = 6
_NUM_ANSWERS = 8
_VERSIONS = ("realm_jax", "jax", "flax", "optax", "orbax-checkpoint", "scann")

Report = Callable[[int, int, Mapping[str, float]], None]


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What to measure.

    Attributes:
      model_dir: folder for report.html, report.json and predictions.jsonl.
      corpus: the prepared corpus.
      questions: JSON lines of questions.
      finetuned: how the reader was fine-tuned, and where (`model_dir`).
      warm_started: model directory of the warm start, or "".
      pretrained: model directory of pre-training, or "".
      models: sizes of the models and lengths of pre-training.
      split: of the questions.
      masked_task: masked sentences whose validation split is filled in, or "".
      max_masked: how many of them.
      num_candidates: documents per masked sentence, the null document included.
      searcher: "device" (exact) or "scann".
      embed: how a missing index is made.
      another_corpus: whether the corpus may be another than the models were trained
        on, such as a later version of it, in the same vocabulary. Its indexes are made
        where they are missing.
      title: of the report.
      attribution: source and licence of the text.
      follow: whether to measure again whenever there is something newer; see
        `following.py`, for `run` measures once.
    """

    model_dir: str
    corpus: str
    questions: str
    finetuned: FinetuneConfig
    models: ModelFactory
    warm_started: str = ""
    pretrained: str = ""
    split: str = "test"
    masked_task: str = ""
    max_masked: int = 400
    num_candidates: int = 8
    searcher: str = "device"
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    another_corpus: bool = False
    title: str = "REALM"
    attribution: str = ""
    follow: bool = False

    @property
    def model_dirs(self) -> Sequence[str]:
        """Those of the stages that are measured, in their order."""
        found = (self.warm_started, self.pretrained, self.finetuned.model_dir)
        return [model_dir for model_dir in found if model_dir]


def run(config: EvaluateConfig, report: Report, stop: threading.Event) -> ReportData:
    """Measures all stages that there are and writes report and predictions.

    Raises:
      BadInputError: a stage is missing or unfinished, or is of another model or corpus.
      StoppedError: asked to stop; nothing was written.
    """
    evaluation = _Evaluation(config, report, stop)
    data = evaluation.measure()
    write_report(data, config.model_dir)
    return data


class _Evaluation:
    def __init__(self, config: EvaluateConfig, report: Report, stop: threading.Event):
        self._config = config
        self._report = report
        self._stop = stop
        self._corpus = BlockStore.open(config.corpus)
        vocab_size = self._corpus.vocabulary.size
        self._retriever_config = config.models.retriever_config(vocab_size)
        self._retriever = Retriever(self._retriever_config)
        self._questions = HeldOutQuestions(
            self._corpus, config.questions, config.split, config.models.lengths.query
        )
        self._done = 0

    def measure(self) -> ReportData:
        config = self._config
        per_question: dict[str, dict[str, np.ndarray]] = {}
        if config.warm_started:
            model = self._open(config.warm_started, warm_start.NAME)
            searcher = self._index(config.warm_started, model)
            per_question[report_data.AFTER_ICT] = self._recall(model.tree, searcher)
        masked = pretrained = None
        if config.pretrained:
            model = self._open(config.pretrained, pretrain.NAME)
            pretrained = model.tree
            searcher = self._index(config.pretrained, model)
            per_question[report_data.AFTER_REALM] = self._recall(model.tree, searcher)
            if config.masked_task:
                masked = self._masked_spans(model.tree, searcher)
        finetuned = self._open_finetuned(pretrained)
        parameters = {
            name: count_parameters(tree) for name, tree in finetuned.run.tree.items()
        }
        answered = self._answer(finetuned)
        per_question[report_data.AFTER_FINETUNING] = {
            **{report_data.recall_name(k): hits for k, hits in answered.recall.items()},
            report_data.EXACT_MATCH: answered.exact_match,
        }
        self._tick()
        open_store(config.model_dir).write(
            PREDICTIONS_NAME, predictions_as_lines(answered.predictions).encode()
        )
        return ReportData(
            run=self._describe_run(parameters),
            curves=read_curves(self._config.model_dirs),
            comparison=report_data.compare(per_question),
            masked_accuracy=masked
            and report_data.masked_accuracy(
                masked.correct, masked.null_correct, masked.utility
            ),
            examples=masked_examples(masked, self._corpus, _NUM_EXAMPLES)
            if masked
            else (),
            questions=sample_answers(self._corpus, answered.predictions, _NUM_ANSWERS),
        )

    def _open(self, model_dir: str, stage: str) -> Restored:
        """The parameters a finished stage ended with."""
        self._tick()
        wanted = {
            "model": describe(self._retriever_config),
            "vocabulary_fingerprint": self._corpus.vocabulary.fingerprint,
            "lengths": dataclasses.asdict(self._config.models.lengths),
        }
        if not self._config.another_corpus:
            wanted["corpus_fingerprint"] = self._corpus.fingerprint
        return open_finished(model_dir, stage, wanted)

    def _index(self, model_dir: str, model: Restored) -> Searcher:
        source = IndexSource(
            open_store(model_dir),
            self._corpus,
            self._retriever_config,
            self._config.embed.at_length(self._config.models.lengths.document),
            self._config.searcher,
            donors=self._config.model_dirs,
        )
        params = model.tree["retriever"]
        index = source.load(model.step)
        if index is not None:
            source.require_made_by(index, model.step, params)
        index = index or source.build(model.step, params, self._stop)
        self._tick()
        return index.searcher

    def _recall(self, params: PyTree, searcher: Searcher) -> dict[str, np.ndarray]:
        return {
            report_data.recall_name(k): self._questions.recall(
                self._retriever_config, params["retriever"], searcher, k
            )
            for k in RECALL_AT
        }

    def _masked_spans(self, params: PyTree, searcher: Searcher) -> MaskedSpans:
        config = self._config
        return evaluate_masked_spans(
            self._retriever,
            KnowledgeEncoder(self._retriever_config.bert),
            params,
            corpus=self._corpus,
            searcher=searcher,
            examples=open_examples(self._corpus, config.masked_task, "validation"),
            num_candidates=config.num_candidates,
            lengths=config.models.lengths,
            max_examples=config.max_masked,
        )

    def _open_finetuned(self, pretrained: PyTree | None) -> FinetunedModel:
        self._tick()
        config = self._config
        return FinetunedModel.open(
            config.finetuned,
            self._corpus,
            searcher=config.searcher,
            embed=config.embed,
            another_corpus=config.another_corpus,
            began_as=pretrained and pretrained["retriever"],
            pretrained=config.pretrained,
        )

    def _answer(self, model: FinetunedModel) -> OpenQaEvaluation:
        index = model.index(self._corpus, self._stop)
        self._tick()
        return evaluate_open_qa(
            model.answerer(self._corpus, index),
            self._questions.questions,
            recall_at=RECALL_AT,
        )

    def _describe_run(self, parameters: Mapping[str, int]) -> report_data.RunInfo:
        config, bert = self._config, self._retriever_config.bert
        return report_data.RunInfo(
            title=config.title,
            finished=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            corpus=report_data.CorpusInfo(
                name=config.corpus,
                num_documents=self._corpus.info.get("num_documents", 0),
                num_blocks=self._corpus.num_blocks,
                fingerprint=self._corpus.fingerprint,
                attribution=config.attribution,
            ),
            parameters=parameters,
            settings={
                "encoder": f"{bert.num_layers} layers of {bert.hidden_size}",
                "towers": "shared" if self._retriever_config.shared else "separate",
                "vocabulary": f"{bert.vocab_size:,} wordpieces",
                "candidates": str(config.num_candidates),
                "searcher": config.searcher,
                "questions": f"{len(self._questions.questions)} ({config.split})",
            },
            machine=_machine(),
            versions={name: importlib.metadata.version(name) for name in _VERSIONS},
            stages=[time for d in self._config.model_dirs for time in stage_times(d)],
        )

    def _tick(self) -> None:
        if self._stop.is_set():
            raise StoppedError("stopped; nothing was written")
        total = 2 * len(self._config.model_dirs) + 1
        self._report(min(self._done, total), total, {})
        self._done += 1


def stage_times(model_dir: str) -> list[report_data.StageTime]:
    """How long the updates of each stage took, from the speeds in its metrics."""
    seconds: dict[str, float] = {}
    steps: dict[str, int] = {}
    for line in read_metrics(model_dir):
        stage, step = line["stage"], line["step"]
        new = step - steps.get(stage, 0)
        speed = line["steps_per_second"]
        seconds[stage] = seconds.get(stage, 0.0) + new / speed
        steps[stage] = step
    return [
        report_data.StageTime(stage, seconds[stage], steps[stage]) for stage in steps
    ]


def _machine() -> str:
    device = jax.devices()[0]
    return (
        f"{jax.device_count()} x {device.device_kind}, {os.cpu_count()} CPU cores, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
