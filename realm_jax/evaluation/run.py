"""Evaluates a chain of stages and writes its report.

Several processes of a job split the questions that are read over all their devices. All
else, such as the search, each of them does for itself on its first device, so that the
same floating-point operations are done whatever the devices: predictions have the same
bytes. The first process writes them.
"""

import dataclasses
import datetime
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from realm_jax import multihost, ranges
from realm_jax.answering.hybrid import BM25Index
from realm_jax.answering.reader import Answerer
from realm_jax.answering.search import search_questions
from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import unknown_titles
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.evaluation import comparisons, provenance, report_data
from realm_jax.evaluation.answer_errors import (
    answer_errors,
    by_overlap,
    training_overlap,
)
from realm_jax.evaluation.compare import PREDICTIONS_NAME
from realm_jax.evaluation.loading import (
    FinetunedModel,
    FinishedRun,
    open_finished,
    require_alike,
    require_finished,
    wanted_of,
)
from realm_jax.evaluation.open_qa import (
    Baseline,
    OpenQaEvaluation,
    SameReader,
    evaluate_open_qa,
    predictions_as_lines,
    sample_answers,
)
from realm_jax.evaluation.report import write_report
from realm_jax.evaluation.report_data import ReportData, recorded_stages
from realm_jax.evaluation.stage_results import (
    StageRecalls,
    Values,
    baseline_recalls,
    masked_examples,
)
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import KnownRows
from realm_jax.index.searchers import SEARCHERS, Searcher
from realm_jax.manifests import FileRecord
from realm_jax.metrics.calibration import calibrate
from realm_jax.metrics.curves import read_curves
from realm_jax.metrics.retrieval import articles_of
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.placement import replicate
from realm_jax.stages import FINETUNE, PRETRAIN, WARM_START
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import Which
from realm_jax.training.finetune import AnsweringConfig, FinetuneConfig
from realm_jax.training.index_metrics import HeldOutQuestions
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.masked_spans import HeldOutSpans, MaskedSpans
from realm_jax.training.partitioning import MeshConfig, make_mesh
from realm_jax.training.stage import open_examples
from realm_jax.training.stage_config import require_one_of
from realm_jax.training.state import count_parameters

CONTROL_PREDICTIONS_NAME = "predictions_control.jsonl"
BASELINE_PREDICTIONS_NAME = "predictions_{}.jsonl"
RECALL_AT = (1, 5, 20, 100)
_NUM_EXAMPLES = 6
_NUM_ANSWERS = 8

_log = logging.getLogger(__name__)

Report = Callable[[int, int, Mapping[str, float]], None]


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Configuration of an evaluation.

    Attributes:
      model_dir: folder for report.html, report.json and predictions.jsonl.
      corpus: the prepared corpus.
      questions: JSON lines of questions.
      finetuned: the fine-tuned model: how it answers, or how it was fine-tuned.
      warm_started: model directory of the warm start, or "".
      pretrained: model directory of pre-training, or "".
      starting_point: model directory of a warm start that did not train the retriever,
        or whose query tower BM25 has taught, which then is as it began; or "". By
        default `warm_started`, if BM25 has taught it.
      control_warm_started: model directory of the control's warm start, which was
        continued for the duration of REALM, or "".
      control_finetuned: model directory of the control's fine-tuning, which was
        configured as in `finetuned`, or "".
      pretrained_checkpoint: the checkpoint of pre-training: "last", or "best" by
        held-out utility.
      finetuned_checkpoint: the checkpoint of fine-tuning: "last", or "best" by exact
        match on dev, which is the last where that was not measured.
      models: sizes of the models and lengths of pre-training.
      split: split of the questions.
      masked_task: task of masked sentences for which the validation split is filled in,
        or "".
      max_masked: largest number of masked sentences.
      num_candidates: documents per masked sentence, the null document included.
      searcher: "device" (exact) or "scann".
      max_bm25_blocks: the largest corpus that is read for comparison, by BM25 and for
        the recall of random blocks; 0 leaves these out.
      baselines: whose blocks the fine-tuned reader reads, too: "closed_book" (none; the
        most frequent answer of the training questions), "random", "bm25", "hybrid"
        (those of `realm ask --hybrid`), "starting_point" (its retriever's) and "oracle"
        (one that has the answer). Each takes as long as answering the questions.
      embed: configuration for making a missing index.
      allow_corpus_mismatch: whether the corpus may differ from the one the models were
        trained on, with the same vocabulary, such as a later version of it. Its indexes
        are made where they are missing.
      title: title of the report.
      attribution: source and licence of the text.
      follow: whether to evaluate again for every newer version; handled by `watch.py`,
        as `run` evaluates once.
      verify_files: whether every byte of the corpus is read once at the start, and
        compared with its checksum.
    """

    model_dir: str
    corpus: str
    questions: str
    finetuned: FinetuneConfig | AnsweringConfig
    models: ModelFactory
    warm_started: str = ""
    pretrained: str = ""
    starting_point: str = ""
    control_warm_started: str = ""
    control_finetuned: str = ""
    pretrained_checkpoint: str = "last"
    finetuned_checkpoint: str = "best"
    split: str = "test"
    masked_task: str = ""
    max_masked: int = 400
    num_candidates: int = 8
    searcher: str = "device"
    max_bm25_blocks: int = 500_000
    baselines: Sequence[str] = ()
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    allow_corpus_mismatch: bool = False
    title: str = "REALM"
    attribution: str = ""
    follow: bool = False
    verify_files: bool = True

    def __post_init__(self):
        ranges.require_ranges(
            self,
            model_dir=ranges.PATH,
            corpus=ranges.PATH,
            questions=ranges.PATH,
            max_masked=ranges.whole(1),
            num_candidates=ranges.whole(2),
            max_bm25_blocks=ranges.whole(0),
        )
        if self.control_warm_started and not self.pretrained:
            raise BadInputError(
                "expected PRETRAINED beside CONTROL_WARM_STARTED, got none; the "
                "control is compared with what REALM made of the same warm start"
            )
        for baseline in self.baselines:
            require_one_of("BASELINES", baseline, Baseline)
        if Baseline.STARTING_POINT in self.baselines and not self.starting_point:
            raise BadInputError(
                "expected STARTING_POINT beside the baseline "
                f"{Baseline.STARTING_POINT.value!r}, got none; name the model "
                "directory of a retriever before training, or leave that baseline out"
            )
        require_one_of("SEARCHER", self.searcher, SEARCHERS)
        require_one_of("CHECKPOINT", self.pretrained_checkpoint, Which)
        require_one_of("FINETUNED_CHECKPOINT", self.finetuned_checkpoint, Which)

    @property
    def model_dirs(self) -> Sequence[str]:
        """Model directories of the chain's own stages, in order."""
        found = (self.warm_started, self.pretrained, self.finetuned.model_dir)
        return list(filter(None, found))

    @property
    def measured_dirs(self) -> Sequence[str]:
        """Model directories of chain, starting point and control."""
        others = (
            self.starting_point,
            self.control_warm_started,
            self.control_finetuned,
        )
        return [*self.model_dirs, *filter(None, others)]


def run(config: EvaluateConfig, report: Report, stop: threading.Event) -> ReportData:
    """Evaluates all configured stages, and writes report and predictions.

    Raises:
      StoppedError: `stop` was set; nothing was written.
    """
    data, predictions = _Evaluation(config, report, stop).measure()

    def write() -> None:
        store = open_store(config.model_dir)
        for name, lines in predictions.items():
            store.write(name, lines)
        write_report(data, config.model_dir)

    multihost.run_on_primary(write)
    return data


class _Evaluation:
    def __init__(self, config: EvaluateConfig, report: Report, stop: threading.Event):
        self._config = config
        self._report = report
        self._stop = stop
        self._asked_to_stop = multihost.StopRequest(stop)
        self._mesh = make_mesh(MeshConfig())
        self._corpus = multihost.run_on_all(
            lambda: BlockStore.open(config.corpus, verify=config.verify_files)
        )
        vocab_size = self._corpus.vocabulary.size
        self._retriever_config = config.models.retriever_config(vocab_size)
        self._questions = HeldOutQuestions(
            self._corpus, config.questions, config.split, config.models.lengths.query
        )
        self._require_few_blocks()
        self._warn_of_unknown_titles()
        self._recorded = self._read_recorded()
        self._recalls = StageRecalls(
            self._corpus,
            self._retriever_config,
            self._questions,
            RECALL_AT,
            embed=config.embed.at_length(config.models.lengths.document),
            searcher=config.searcher,
            donors=config.model_dirs,
            tick=self._tick,
            stop=stop,
        )
        self._done = 0

    def measure(self) -> tuple[ReportData, dict[str, bytes]]:
        """Returns what is reported, and the files of predictions that it lists."""
        config = self._config
        self._require_comparable()
        per_question: dict[str, Values] = {}
        taught = started = None
        if config.warm_started:
            taught = self._open(config.warm_started, WARM_START.name)
        if config.starting_point:
            started = self._open_starting_point()
        elif taught is not None and taught.has_learned_from_bm25:
            started = taught.before_training()
        for label, model in (
            (comparisons.BEFORE_TRAINING, started),
            (comparisons.AFTER_WARM_START, taught),
        ):
            if model is not None:
                per_question[label] = self._recalls.of_stage(model)
        masked = pretrained = None
        if config.pretrained:
            which = Which(config.pretrained_checkpoint)
            pretrained = self._open(config.pretrained, PRETRAIN.name, which)
            searcher = self._recalls.index(pretrained)
            per_question[comparisons.AFTER_REALM] = self._recalls.measure(
                pretrained, searcher
            )
            if config.masked_task:
                masked = self._masked_spans(pretrained.tree, searcher)
        finetuned = self._open_finetuned(config.finetuned.model_dir, pretrained)
        answerer = self._answerer(finetuned)
        answered = self._answer(answerer)
        scores = _scores(answered)
        per_question[comparisons.AFTER_FINETUNING] = scores
        baselines = baseline_recalls(
            self._corpus,
            self._questions.questions,
            recall_at=RECALL_AT,
            max_blocks=config.max_bm25_blocks,
            bm25=lambda: self._bm25,
        )
        by_baseline = self._same_reader(finetuned, answerer, answered)
        control, by_control = self._control(per_question)
        self._tick()
        predictions = {
            PREDICTIONS_NAME: self._predictions(finetuned, answered, per_question)
        }
        if by_control:
            of_control = {comparisons.AFTER_FINETUNING: _scores(by_control[1])}
            predictions[CONTROL_PREDICTIONS_NAME] = self._predictions(
                *by_control, of_control
            )
        for baseline, read in by_baseline.items():
            name = BASELINE_PREDICTIONS_NAME.format(baseline.value)
            measured = {comparisons.AFTER_FINETUNING: _reading(read)}
            predictions[name] = self._predictions(finetuned, read, measured)
        parameters = {
            name: count_parameters(tree) for name, tree in finetuned.run.tree.items()
        }
        data = ReportData(
            run=self._describe_run(parameters),
            curves=read_curves(config.model_dirs),
            comparison=comparisons.compare(per_question, baselines),
            same_reader=comparisons.compare_with_baselines(
                {b.label: _reading(read) for b, read in by_baseline.items()},
                (comparisons.AFTER_FINETUNING, _reading(answered)),
            ),
            control=control,
            masked_accuracy=masked
            and comparisons.masked_accuracy(
                masked.correct,
                masked.null_correct,
                masked.utility,
                articles_of(self._corpus, np.asarray(masked.batch.source_block)),
            ),
            examples=masked_examples(masked, self._corpus, _NUM_EXAMPLES)
            if masked
            else (),
            questions=sample_answers(answered.predictions, _NUM_ANSWERS),
            best_checkpoint=provenance.best_checkpoint(config.pretrained),
            finetuned_checkpoint=provenance.chosen_checkpoint(
                config.finetuned.model_dir, finetuned.run.step
            ),
            topics=comparisons.by_topic(
                [question.topic for question in self._questions.questions], scores
            ),
            errors=answer_errors([p.outcome for p in answered.predictions]),
            calibration=calibrate(answered.probability, answered.exact_match > 0),
            overlaps=self._by_overlap(finetuned, answered, scores),
            recorded=self._recorded,
            files={name: FileRecord.of(lines) for name, lines in predictions.items()},
        )
        return data, predictions

    def _require_few_blocks(self) -> None:
        limit, found = self._config.max_bm25_blocks, self._corpus.num_blocks
        by_words = [
            name
            for name in self._config.baselines
            if name in (Baseline.BM25, Baseline.HYBRID)
        ]
        if by_words and found > limit:
            raise BadInputError(
                f"expected at most {limit:,} blocks (MAX_BM25_BLOCKS) for the baseline "
                f"{by_words[0]!r}, got {found:,}; leave it out, or raise the "
                "limit if the words of all blocks fit into memory"
            )

    def _warn_of_unknown_titles(self) -> None:
        # As for BM25, larger corpora take too long to read.
        if self._corpus.num_blocks <= self._config.max_bm25_blocks:
            unknown = unknown_titles(self._corpus, self._questions.questions)
            if unknown:
                _log.warning("%s", unknown)

    def _read_recorded(self) -> list[report_data.RecordedStage]:
        """Reads before the evaluation, which takes long, what may be damaged."""
        config = self._config
        stages = (
            (WARM_START.name, config.warm_started),
            (PRETRAIN.name, config.pretrained),
            (FINETUNE.name, config.finetuned.model_dir),
        )
        return recorded_stages(
            [(stage, model_dir) for stage, model_dir in stages if model_dir],
            others=[config.corpus, config.model_dir],
        )

    @functools.cached_property
    def _words(self) -> BM25Index:
        return BM25Index(self._corpus)

    @functools.cached_property
    def _bm25(self) -> np.ndarray:
        """The blocks that BM25 finds for each question."""
        texts = [question.question for question in self._questions.questions]
        return np.asarray(self._words.search(texts, max(RECALL_AT)).ids)

    def _same_reader(
        self,
        model: FinetunedModel,
        answerer: Answerer,
        answered: OpenQaEvaluation,
    ) -> dict[Baseline, OpenQaEvaluation]:
        """Returns what the reader answers from what each baseline finds."""
        if not self._config.baselines:
            return {}
        series = model.source(self._corpus).series
        embeddings = KnownRows(series, series.read_manifest(model.index_step))
        reader = SameReader(answerer, embeddings, self._questions.questions, answered)
        read: dict[Baseline, Callable[[], OpenQaEvaluation]] = {
            Baseline.CLOSED_BOOK: lambda: reader.read_nothing(
                model.training_sets(self._corpus)
            ),
            Baseline.RANDOM: reader.read_random,
            Baseline.BM25: lambda: reader.read(self._bm25),
            Baseline.HYBRID: lambda: reader.read_hybrid(self._words),
            Baseline.STARTING_POINT: lambda: reader.read(self._found_before_training()),
            Baseline.ORACLE: reader.read_oracle,
        }
        found = {}
        for baseline in map(Baseline, self._config.baselines):
            self._tick()
            found[baseline] = read[baseline]()
        return found

    def _found_before_training(self) -> np.ndarray:
        model = self._open_starting_point()
        searcher = self._recalls.index(model)
        retriever = model.tree["retriever"]
        k = self._config.finetuned.num_read
        found = search_questions(
            self._retriever_config, retriever, searcher, self._questions.ids, k
        )
        return np.asarray(found.ids)

    def _control(
        self, with_realm: Mapping[str, Values]
    ) -> tuple[
        comparisons.ControlComparison | None,
        tuple[FinetunedModel, OpenQaEvaluation] | None,
    ]:
        """Compares the control with the chain; returns its model and answers, too."""
        config, warm_started = self._config, self._config.control_warm_started
        without_realm: dict[str, Values] = {}
        began = by_control = None
        if warm_started:
            began = self._open(warm_started, WARM_START.name)
            without_realm[comparisons.AFTER_REALM] = self._recalls.of_stage(began)
        if config.control_finetuned:
            control = self._open_finetuned(
                config.control_finetuned, began, "CONTROL_WARM_STARTED"
            )
            control.require_same_pretrained_run(self._corpus)
            answered = self._answer(self._answerer(control))
            by_control = control, answered
            without_realm[comparisons.AFTER_FINETUNING] = _scores(answered)
        if not without_realm:
            return None, None
        comparison = comparisons.compare_with_control(
            with_realm,
            without_realm,
            realm_time=provenance.time_of(config.pretrained, PRETRAIN.name),
            control_time=provenance.time_of(warm_started, WARM_START.name),
        )
        return comparison, by_control

    def _require_comparable(self) -> None:
        """Checks the control before the evaluation, which takes long."""
        config = self._config
        if config.control_warm_started:
            require_finished(
                config.control_warm_started, WARM_START.name, self._wanted()
            )
        if config.control_finetuned:
            wanted = self._wanted(config.finetuned.models)
            require_alike(config.finetuned, config.control_finetuned, wanted)

    def _open(
        self, model_dir: str, stage: str, checkpoint: Which = Which.LAST
    ) -> FinishedRun:
        """Returns the last or the best parameters of a finished stage."""
        self._tick()
        return open_finished(model_dir, stage, self._wanted(), checkpoint)

    def _open_starting_point(self) -> FinishedRun:
        model = self._open(self._config.starting_point, WARM_START.name)
        return model.before_training() if model.has_learned_from_bm25 else model

    def _wanted(self, models: ModelFactory | None = None) -> dict[str, Any]:
        """Returns what runs must be of; questions may have another padded length."""
        config = self._config
        return wanted_of(
            models or config.models,
            self._corpus,
            allow_corpus_mismatch=config.allow_corpus_mismatch,
        )

    def _masked_spans(self, params: PyTree, searcher: Searcher) -> MaskedSpans:
        config = self._config
        spans = HeldOutSpans(
            Retriever(self._retriever_config),
            KnowledgeEncoder(self._retriever_config.bert),
            corpus=self._corpus,
            examples=open_examples(
                self._corpus,
                config.masked_task,
                "validation",
                verify=config.verify_files,
            ),
            num_candidates=config.num_candidates,
            lengths=config.models.lengths,
            max_examples=config.max_masked,
        )
        return spans.fill_in(params, searcher)

    def _open_finetuned(
        self,
        model_dir: str,
        pretrained_run: FinishedRun | None,
        macro: str = "PRETRAINED",
    ) -> FinetunedModel:
        self._tick()
        config = self._config
        return FinetunedModel.open(
            dataclasses.replace(config.finetuned, model_dir=model_dir),
            self._corpus,
            searcher=config.searcher,
            embed=config.embed,
            allow_corpus_mismatch=config.allow_corpus_mismatch,
            pretrained_run=pretrained_run,
            macro=macro,
            checkpoint=Which(config.finetuned_checkpoint),
        )

    def _by_overlap(
        self, model: FinetunedModel, answered: OpenQaEvaluation, scores: Values
    ) -> list[comparisons.ComparisonRow]:
        """Returns results by overlap; none where the training set is not at hand."""
        sets = model.training_sets(self._corpus)
        if not sets:
            return []
        found = training_overlap(sets, self._questions.questions, answered.question_ids)
        return by_overlap(found, scores)

    def _answerer(self, model: FinetunedModel) -> Answerer:
        index = model.index(self._corpus, self._stop)
        self._tick()
        answerer = model.corpus_search(self._corpus, index)
        reader = replicate(self._mesh, answerer.params["reader"])
        return dataclasses.replace(
            answerer, params={**answerer.params, "reader": reader}, mesh=self._mesh
        )

    def _answer(self, answerer: Answerer) -> OpenQaEvaluation:
        return evaluate_open_qa(
            answerer, self._questions.questions, recall_at=RECALL_AT
        )

    def _predictions(
        self,
        model: FinetunedModel,
        answered: OpenQaEvaluation,
        measured: Mapping[str, Values],
    ) -> bytes:
        manifest = model.source(self._corpus).series.read_manifest(model.index_step)
        index = {
            "step": manifest.step,
            "attempt": manifest.attempt,
            "corpus_fingerprint": manifest.corpus_fingerprint,
        }
        return predictions_as_lines(answered.predictions, measured, index).encode()

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
                "pre-training checkpoint": config.pretrained_checkpoint,
                "questions": f"{len(self._questions.questions)} ({config.split})",
            },
            machine=provenance.machine(),
            versions=provenance.versions(),
            stages=[
                time for d in config.model_dirs for time in provenance.stage_times(d)
            ],
            split=config.split,
            held_out_split=self._held_out_split(),
        )

    def _held_out_split(self) -> str:
        """Returns the split that pre-training searched, "" if it recorded none."""
        for stage in self._recorded:
            if stage.stage == PRETRAIN.name and stage.starts:
                settings = stage.starts[-1].settings
                if settings.get("questions"):
                    return str(settings.get("questions_split", ""))
        return ""

    def _tick(self) -> None:
        if self._asked_to_stop.is_set():
            raise StoppedError("stopped; nothing was written")
        config = self._config
        total = 2 * len(config.measured_dirs) + len(config.baselines) + 1
        self._report(min(self._done, total), total, {})
        self._done += 1


def _scores(answered: OpenQaEvaluation) -> Values:
    scores = {comparisons.recall_name(k): hits for k, hits in answered.recall.items()}
    return scores | _answer_scores(answered)


def _answer_scores(answered: OpenQaEvaluation) -> Values:
    scores = {comparisons.EXACT_MATCH: answered.exact_match}
    return scores if answered.f1 is None else scores | {comparisons.F1: answered.f1}


def _reading(answered: OpenQaEvaluation) -> Values:
    scores = _answer_scores(answered)
    if not answered.retrieved.size:
        return scores
    return {**scores, comparisons.ANSWER_READ: answered.answer_read}
