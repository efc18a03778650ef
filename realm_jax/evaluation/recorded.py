"""Finds a trained model and its corpus from what training has recorded.

`realm ask RUN`, `realm search RUN`, `realm evaluate RUN` and `realm_jax.load` need no
gin files: RUN is the folder of a chain, such as runs/quickstart, or a model directory
in it. Sizes, lengths, corpus and starting point are in the records of the runs.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realm_jax.data.blocks import read_info
from realm_jax.data.versions import is_version_of
from realm_jax.errors import BadInputError
from realm_jax.evaluation.ask import AskConfig
from realm_jax.evaluation.run import EvaluateConfig
from realm_jax.run_record import Trained
from realm_jax.stages import EVALUATE, FINETUNE, PRETRAIN, WARM_START, StageSpec
from realm_jax.training.finetune import READING, AnsweringConfig
from realm_jax.training.initialization import ModelFactory, described_models
from realm_jax.training.recorded import RecordedRun, open_run
from realm_jax.types import Lengths

SEARCHED = (FINETUNE, PRETRAIN, WARM_START)
"""Stages whose retriever can be searched with, the last of a chain first."""

_CORPUS = "corpus"
# What stages must have in common to be measured together.
_SHARED = ("model", "lengths", "corpus_fingerprint", "vocabulary_fingerprint")


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What a person says beside RUN; everything else is found.

    Attributes:
      corpus: the prepared corpus.
      pretrained: the model directory that fine-tuning began with.
      num_read: number of blocks read per question.
      searcher: "device" or "scann".
      allow_corpus_mismatch: whether `corpus` may be any corpus of the vocabulary.
    """

    corpus: str = ""
    pretrained: str = ""
    num_read: int | None = None
    searcher: str = ""
    allow_corpus_mismatch: bool = False


def models_of(run: RecordedRun, **numerics: str) -> ModelFactory:
    """Returns sizes and lengths of a run's models; `numerics` as `described_models`.

    Raises:
      BadInputError: they are not the settings of this version.
    """
    with _settings_of_this_version(run):
        lengths = Lengths(**run.trained.lengths)
        return described_models(run.trained.model, lengths, **numerics)


def answering_config(
    run: RecordedRun, given: Overrides = Overrides()
) -> AnsweringConfig:
    """Returns how a fine-tuned model answers; reads no arrays.

    Raises:
      BadInputError: num_read is neither given nor recorded, or below 1; or its settings
        are not those of this version.
    """
    trained = run.trained
    num_read = trained.num_read if given.num_read is None else given.num_read
    if num_read is None:
        raise BadInputError(
            f"expected num_read in the record of {run.model_dir}, which was written "
            "before that was recorded; give num_read= as it was fine-tuned with"
        )
    models = models_of(run, **trained.numerics)
    searcher = given.searcher or trained.searcher or "device"
    with _settings_of_this_version(run):
        reading = {name: trained.data_order[name] for name in READING}
    return AnsweringConfig(run.model_dir, models, searcher, num_read, **reading)


@contextlib.contextmanager
def _settings_of_this_version(run: RecordedRun) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError) as error:
        raise BadInputError(
            f"expected the record of {run.model_dir} to have the settings of this "
            f"version, got others ({error}); open it with the version it is of"
        ) from error


def find_model(
    run: str | os.PathLike[str], stages: Sequence[StageSpec] = (FINETUNE,)
) -> RecordedRun:
    """Returns the run of a stage: RUN itself, or one in it.

    Args:
      run: the folder of a chain or a model directory; of gs://, the stages' folders
        have their usual names.
      stages: the stages that will do; of a chain, the first of them that it has.

    Raises:
      BadInputError: there is no such model, or several.
    """
    place = os.fspath(run)
    itself = open_run(place)
    if itself is not None:
        if itself.trained.stage in [spec.name for spec in stages]:
            return itself
        raise BadInputError(
            f"expected a fine-tuned model in {place}, got a run of "
            f"{itself.trained.stage}; fine-tune it with `realm finetune` and name that "
            "folder, or use `realm search`"
        )
    if "://" not in place and not Path(place).is_dir():
        raise BadInputError(
            f"expected the folder of a chain, such as runs/quickstart, or of a "
            f"trained model, got {place}, which does not exist; correct the path"
        )
    runs = [found for folder in _folders(place) if (found := open_run(folder))]
    for spec in stages:
        found = {one.model_dir: one for one in runs if one.trained.stage == spec.name}
        usual = within(place, spec.name)
        if usual in found:
            return found[usual]
        if len(found) > 1:
            raise BadInputError(
                f"expected one run of `realm {spec.command}` in {place}, got "
                f"{', '.join(found)}; name one of them"
            )
        if found:
            return next(iter(found.values()))
    commands = " or ".join(f"`realm {spec.command}`" for spec in stages)
    raise BadInputError(
        f"expected a checkpoint of {commands} in {place} or a folder in it, found no "
        "checkpoint of it; train a model there, or name another folder"
    )


def find_corpus(
    run: RecordedRun,
    given: str = "",
    *,
    allow_mismatch: bool = False,
    option: str = "--corpus FOLDER",
) -> tuple[str, bool]:
    """Finds the corpus that a model searches.

    Without one that is given it is the corpus that the model was trained on: beside
    the model directory, or where it was then. A later version of it
    (`realm update-corpus`) can be given too, for its vocabulary is the same and most of
    its blocks are.

    Args:
      run: a training stage.
      given: the corpus, or "".
      allow_mismatch: whether `given` may be any other corpus of the vocabulary.
      option: how a corpus is given, for messages.

    Returns:
      Its folder, and whether it differs from the one that was trained on.

    Raises:
      BadInputError: there is none, or it is of another vocabulary, or not a version of
        the one that was trained on; or the stage has not ended.
    """
    model_dir, trained = run.model_dir, run.trained
    run.require(trained.stage, {})
    if given:
        info = read_info(given)
        _require_vocabulary(given, info, run)
        differs = info["fingerprint"] != trained.corpus_fingerprint
        if differs and not allow_mismatch:
            _require_later_version(given, info, run, option)
        return given, differs
    seen = []
    for place in dict.fromkeys([within(parent(model_dir), _CORPUS), trained.corpus]):
        if not place:
            continue
        seen.append(f"no corpus in {place}")
        with contextlib.suppress(BadInputError):
            if read_info(place)["fingerprint"] == trained.corpus_fingerprint:
                return place, False
            seen[-1] = f"another corpus in {place}"
    raise BadInputError(
        f"expected the corpus that {model_dir} was trained on "
        f"({trained.corpus_fingerprint[:12]}), found {' and '.join(seen)}; if it lies "
        f"elsewhere now, give {option}"
    )


def _require_vocabulary(corpus: str, info: Mapping[str, Any], run: RecordedRun) -> None:
    wanted = run.trained.vocabulary_fingerprint[:12]
    found = info.get("vocabulary_fingerprint", "")[:12]
    if wanted != found:
        raise BadInputError(
            f"expected a corpus with the vocabulary of {run.model_dir} (fingerprint "
            f"{wanted}), got {corpus} with {found}; prepare it with VOCABULARY set to "
            "the vocab.txt of the corpus that was trained on"
        )


def _require_later_version(
    corpus: str, info: Mapping[str, Any], run: RecordedRun, option: str
) -> None:
    trained = run.trained.corpus_fingerprint
    if not is_version_of(corpus, trained):
        raise BadInputError(
            f"expected the corpus that {run.model_dir} was trained on (fingerprint "
            f"{trained[:12]}) or a later version of it, got {corpus} "
            f"({info['fingerprint'][:12]}); give another with {option}, or allow the "
            "mismatch (allow_corpus_mismatch)"
        )


def find_pretrained(run: RecordedRun, given: str = "") -> str:
    """Returns the run of pre-training that fine-tuning began with; "" for none."""
    if given:
        return given
    recorded = run.trained.source
    # Beside the model first: a chain may have been moved.
    beside = parent(run.model_dir)
    name = Path(recorded).name or PRETRAIN.name
    for place in (within(beside, name), recorded, within(beside, PRETRAIN.name)):
        found = open_run(place) if place else None
        if found is not None and found.trained.stage == PRETRAIN.name:
            return place
    return ""


def ask_config(
    run: str | RecordedRun, given: Overrides = Overrides(), **settings: Any
) -> AskConfig:
    """Returns the configuration of `realm ask` for a run; reads no arrays.

    Args:
      run: as in `find_model`, or what that has found.
      given: what is not to be found.
      **settings: of `AskConfig`, such as `port`.
    """
    model = run if isinstance(run, RecordedRun) else find_model(run)
    corpus, differs = find_corpus(
        model, given.corpus, allow_mismatch=given.allow_corpus_mismatch
    )
    finetuned = answering_config(model, given)
    # It embeds later versions; with two towers the model does so itself.
    is_needed = model.trained.model["shared"] or given.pretrained
    pretrained = find_pretrained(model, given.pretrained) if is_needed else ""
    return AskConfig(
        corpus=corpus,
        finetuned=finetuned,
        pretrained=pretrained,
        pretrained_checkpoint=model.trained.source_checkpoint if pretrained else "last",
        searcher=finetuned.searcher,
        allow_corpus_mismatch=differs,
        **settings,
    )


def evaluate_config(
    run: str,
    given: Overrides,
    *,
    questions: str = "",
    output: str = "",
    split: str = "test",
    note: Callable[[str], None] = lambda text: None,
) -> EvaluateConfig:
    """Returns the configuration of `realm evaluate` for a run; reads no arrays.

    Of the folder of a chain every finished stage is measured; of the model directory of
    fine-tuning that model alone.

    Args:
      run: as in `find_model`.
      given: what is not to be found.
      questions: JSON lines of questions; "" for those that the run recorded.
      output: folder of the report; "" for RUN/evaluate.
      split: split of the questions.
      note: called with a sentence on each stage that is left out.
    """
    model = find_model(run)
    corpus, differs = find_corpus(
        model, given.corpus, allow_mismatch=given.allow_corpus_mismatch
    )
    finetuned = answering_config(model, given)
    began = find_pretrained(model, given.pretrained)
    pretrained = _finished(began, PRETRAIN) if began else None
    is_chain = os.path.normpath(run) != os.path.normpath(model.model_dir)
    measured = pretrained if is_chain and pretrained else model
    warm_started = within(run, WARM_START.name) if is_chain else ""
    if warm_started and not _is_alike(warm_started, measured.trained, note):
        warm_started = ""
    has_pretrained = measured is pretrained
    return EvaluateConfig(
        model_dir=output or within(run, EVALUATE.name),
        corpus=corpus,
        questions=questions or _recorded_questions(model, pretrained),
        finetuned=finetuned,
        models=models_of(measured),
        warm_started=warm_started,
        pretrained=began if has_pretrained or measured.trained.model["shared"] else "",
        pretrained_checkpoint=model.trained.source_checkpoint,
        split=split,
        # Masked sentences are of the corpus that was trained on.
        masked_task=measured.trained.data_order["task"]
        if has_pretrained and not differs
        else "",
        searcher=finetuned.searcher,
        allow_corpus_mismatch=differs,
        title=Path(parent(model.model_dir) if is_chain else model.model_dir).name,
    )


def _finished(model_dir: str, stage: StageSpec) -> RecordedRun | None:
    """Returns a run of a stage that has ended; None if there is none."""
    run = open_run(model_dir)
    is_such = run is not None and run.trained.stage == stage.name and run.has_ended
    return run if is_such else None


def _is_alike(model_dir: str, wanted: Trained, note: Callable[[str], None]) -> bool:
    """Returns whether a warm start can be measured with the stages after it."""
    run = _finished(model_dir, WARM_START)
    if run is None:
        return False
    identity = wanted.identity()
    for change in run.trained.differences({name: identity[name] for name in _SHARED}):
        note(
            f"{model_dir} is left out: its {change.name} is {change.second!r}, and "
            f"{change.first!r} in the stages after it"
        )
        return False
    return True


def _recorded_questions(model: RecordedRun, pretrained: RecordedRun | None) -> str:
    """Returns where the questions are that fine-tuning or pre-training held out."""
    questions = model.trained.questions
    if pretrained is not None:
        questions = questions or pretrained.trained.questions
    if not questions:
        raise BadInputError(
            f"expected questions to evaluate {model.model_dir} with, but the runs it "
            "was made from record none; give --questions FILE, JSON lines of questions"
        )
    if "://" not in questions and not Path(questions).exists():
        raise BadInputError(
            f"expected the questions of {model.model_dir} in {questions}, found "
            "nothing there; give --questions FILE, JSON lines of questions"
        )
    return questions


def _folders(run: str) -> list[str]:
    if "://" in run:
        return [within(run, stage.name) for stage in SEARCHED]
    return sorted(within(run, path.name) for path in Path(run).iterdir())


def within(folder: str, name: str) -> str:
    """Returns the location of a folder in another one, local or of gs://."""
    return f"{folder.rstrip('/')}/{name}"


def parent(folder: str) -> str:
    """Returns the folder that another one is in, local or of gs://."""
    if "://" in folder:
        return folder.rstrip("/").rpartition("/")[0]
    return str(Path(folder).expanduser().absolute().parent)
