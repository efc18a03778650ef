"""Provides the content of a report as plain data that can be written as JSON.

Probabilities and rates are between 0 and 1, likelihoods in nats, times in seconds.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from realm_jax.evaluation.answer_errors import AnswerErrors
from realm_jax.evaluation.comparisons import (
    Comparison,
    ComparisonRow,
    ControlComparison,
    MaskedAccuracy,
    StageTime,
)
from realm_jax.manifests import FileRecord
from realm_jax.metrics.calibration import Calibration
from realm_jax.metrics.curves import Curve
from realm_jax.run_record import RunRecord, read_records
from realm_jax.stages import STAGES
from realm_jax.storage import open_store


@dataclasses.dataclass(frozen=True)
class CorpusInfo:
    """The corpus that was searched, and source and licence of its text."""

    name: str
    num_documents: int
    num_blocks: int
    fingerprint: str
    attribution: str = ""


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Description of a run and its machine.

    Attributes:
      finished: date and time, as displayed.
      parameters: model -> number of parameters.
      settings: name -> value, for repeating the run.
      split: split of the questions that were measured; "" if unknown.
      held_out_split: split of the questions that pre-training searched with every new
        index; "" if unknown.
    """

    title: str
    finished: str
    corpus: CorpusInfo
    parameters: Mapping[str, int]
    settings: Mapping[str, str]
    machine: str
    versions: Mapping[str, str]
    stages: Sequence[StageTime] = ()
    split: str = ""
    held_out_split: str = ""

    @property
    def questions(self) -> str:
        """What the page calls the questions that were measured."""
        return f"{self.split} questions".lstrip()

    @property
    def held_out_questions(self) -> str:
        """What the page calls the questions that pre-training searched."""
        return f"held-out {self.held_out_split} questions".replace("  ", " ")


@dataclasses.dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of pre-training with the highest held-out utility, and the last.

    The utility of the last one is None if it was not measured.
    """

    step: int
    utility: float
    last_step: int
    last_utility: float | None = None


@dataclasses.dataclass(frozen=True)
class ChosenCheckpoint:
    """The checkpoint of fine-tuning that was measured, and the last for comparison.

    Exact match is that on the questions that fine-tuning held out.
    """

    step: int
    exact_match: float
    last_step: int
    last_exact_match: float


@dataclasses.dataclass(frozen=True)
class ExampleDocument:
    """A document of an example; the null document has no title and no snippet.

    Attributes:
      block_id: -1 for the null document.
      snippet: the beginning of its body, or the part around the answer.
      retrieval_probability: p(z|x).
      answer_probability: p(y|z,x).
    """

    block_id: int
    title: str
    snippet: str
    retrieval_probability: float
    answer_probability: float


@dataclasses.dataclass(frozen=True)
class MaskedExample:
    """A masked span, `answer`, and the effect of retrieval on it (REALM, table 3).

    Attributes:
      before: the sentence up to the masked span, with the space before it, if any.
      after: the sentence after the masked span, with the space after it, if any.
      documents: all candidates, the null document included.
      marginal: p(y|x).
    """

    before: str
    answer: str
    after: str
    documents: Sequence[ExampleDocument]
    marginal: float


@dataclasses.dataclass(frozen=True)
class AnsweredQuestion:
    """A question of the test set with its answer and where it was found.

    Attributes:
      answer: the original characters of the best span; empty if there was none.
      correct: whether it is right by exact match.
      probability: probability of the answer's span among all spans that were read.
      title: article of the block in which it was found.
    """

    question: str
    references: Sequence[str]
    answer: str
    correct: bool
    probability: float
    title: str
    before: str = ""
    after: str = ""


@dataclasses.dataclass(frozen=True)
class RecordedStage:
    """A stage of a run with what its command recorded at each of its starts.

    Attributes:
      starts: in the order of time; empty for a directory of an earlier version, which
        recorded nothing.
    """

    stage: str
    starts: Sequence[RunRecord] = ()


def recorded_stages(
    model_dirs: Sequence[tuple[str, str]], others: Iterable[str] = ()
) -> list[RecordedStage]:
    """Returns what the stages of a run recorded.

    Of `model_dirs`, by the names of their stages, each is among the results even if
    nothing was recorded; of the `others`, such as the corpus, those commands that
    recorded something.
    """
    found: dict[str, list[RunRecord]] = {stage: [] for stage, _ in model_dirs}
    for directory in (*(model_dir for _, model_dir in model_dirs), *others):
        for record in read_records(open_store(directory)):
            found.setdefault(record.command.replace("-", "_"), []).append(record)
    order = [spec.name for spec in STAGES.values() if spec.title]
    return [RecordedStage(name, found[name]) for name in order if name in found]


@dataclasses.dataclass(frozen=True)
class ReportData:
    """The content of a report; parts that were not measured are empty.

    Attributes:
      curves: metrics over steps, of all stages.
      comparison: what each stage reached, on the same questions.
      same_reader: what the reader answers from blocks that baselines find, and what
        the fine-tuned retriever adds to each.
      control: the chain beside the same chain without REALM.
      examples: masked sentences with the documents that were considered.
      finetuned_checkpoint: None if the last is measured for want of held-out questions.
      topics: results of the last stage, a row for each topic of the questions.
      errors: where its questions are lost.
      calibration: its p(y|x) beside the share of right answers.
      overlaps: its results by what of a question occurs in the training set.
      files: the predictions beside the report, by the names of their files.
    """

    run: RunInfo
    curves: Sequence[Curve] = ()
    comparison: Comparison = dataclasses.field(default_factory=Comparison)
    same_reader: Comparison = dataclasses.field(default_factory=Comparison)
    control: ControlComparison | None = None
    masked_accuracy: MaskedAccuracy | None = None
    examples: Sequence[MaskedExample] = ()
    questions: Sequence[AnsweredQuestion] = ()
    best_checkpoint: BestCheckpoint | None = None
    finetuned_checkpoint: ChosenCheckpoint | None = None
    topics: Sequence[ComparisonRow] = ()
    errors: AnswerErrors | None = None
    calibration: Calibration | None = None
    overlaps: Sequence[ComparisonRow] = ()
    recorded: Sequence[RecordedStage] = ()
    files: Mapping[str, FileRecord] = dataclasses.field(default_factory=dict)
