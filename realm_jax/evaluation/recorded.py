"""Finds a trained model and its corpus from what training has recorded.

`realm ask RUN`, `realm search RUN`, `realm evaluate RUN` and `realm_jax.load` need no
gin files: RUN is the folder of a chain, such as runs/quickstart, or a model directory
in it. Sizes, lengths, corpus and starting point are in the records of the runs.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from realm_jax.data.blocks import read_info
from realm_jax.data.versions import is_version_of
from realm_jax.errors import BadInputError
from realm_jax.evaluation.ask import AskConfig
from realm_jax.evaluation.loading import require_finished
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
    """What a person says beside RUN, as `cli/recorded_run.py` explains it."""

    corpus: str = ""
    pretrained: str = ""
    num_read: int | None = None
    retrieval_weight: float | None = None
    searcher: str = ""
    allow_corpus_mismatch: bool = False


def require_fine_tuned(run: RecordedRun, given: Overrides) -> None:
    """Checks that nothing is said of a run that only fine-tuned models have."""
    if run.trained.stage == FINETUNE.name:
        return
    for name in ("pretrained", "num_read", "retrieval_weight"):
        if getattr(given, name) not in ("", None):
            raise BadInputError(
                f"expected a fine-tuned model with {name}, got {run.model_dir}, a run "
                f"of {run.trained.stage}; leave {name} out"
            )


def models_of(run: RecordedRun, **numerics: str) -> ModelFactory:
    """Returns sizes and lengths of a run's models; see `described_models`."""
    with _settings_of_this_version(run):
        lengths = Lengths(**run.trained.lengths)
        return described_models(run.trained.model, lengths, **numerics)


def answering_config(
    run: RecordedRun, given: Overrides = Overrides()
) -> AnsweringConfig:
    """Returns how a fine-tuned model answers; reads no arrays."""
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
    weight = given.retrieval_weight
    if weight is None:
        weight = trained.retrieval_weight
    return AnsweringConfig(
        run.model_dir,
        models,
        searcher,
        num_read,
        retrieval_weight=weight,
        **reading,
    )


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
    """Returns the run of the first stage of some that is found: RUN, or one in it.

    In gs:// the folders of a chain must have the names of their stages.
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
            "expected the folder of a chain, such as runs/quickstart, or of a trained "
            f"model, got {place}, which does not exist; correct the path"
        )
    opened = functools.cache(open_run)
    for spec in stages:
        # The folder with the usual name first: most often no other need be opened.
        for folders in ([within(place, spec.name)], _folders(place)):
            runs = filter(None, map(opened, folders))
            found = [one for one in runs if one.trained.stage == spec.name]
            if len(found) > 1:
                raise BadInputError(
                    f"expected one run of `realm {spec.command}` in {place}, got "
                    f"{', '.join(one.model_dir for one in found)}; name one of them"
                )
            if found:
                return found[0]
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
    """Returns the folder of the corpus that a model searches, and whether it differs.

    It is `given`, the one that the model was trained on or a later version of it, or
    with `allow_mismatch` any of the vocabulary; else the former, beside the model
    directory or where it was then. `option` says in messages how a corpus is given.
    """
    trained = run.trained
    run.require(trained.stage, {})
    if given:
        differs = read_info(given)["fingerprint"] != trained.corpus_fingerprint
        _require_usable(given, run, allow_mismatch or not differs, option)
        return given, differs
    seen = []
    places = [within(parent(run.model_dir), _CORPUS), trained.corpus]
    for place in filter(None, dict.fromkeys(places)):
        seen.append(f"no corpus in {place}")
        with contextlib.suppress(BadInputError):
            if read_info(place)["fingerprint"] == trained.corpus_fingerprint:
                return place, False
            seen[-1] = f"another corpus in {place}"
    raise BadInputError(
        f"expected the corpus that {run.model_dir} was trained on "
        f"({trained.corpus_fingerprint[:12]}), found {' and '.join(seen)}; if it lies "
        f"elsewhere now, give {option}"
    )


def _require_usable(
    corpus: str, run: RecordedRun, allow_mismatch: bool, option: str
) -> None:
    trained, info = run.trained, read_info(corpus)
    found = info.get("vocabulary_fingerprint", "")
    if trained.vocabulary_fingerprint != found:
        raise BadInputError(
            f"expected a corpus with the vocabulary of {run.model_dir} (fingerprint "
            f"{trained.vocabulary_fingerprint[:12]}), got {corpus} with {found[:12]}; "
            "prepare it with VOCABULARY set to the vocab.txt of the corpus that was "
            "trained on"
        )
    if not allow_mismatch and not is_version_of(corpus, trained.corpus_fingerprint):
        raise BadInputError(
            f"expected the corpus that {run.model_dir} was trained on (fingerprint "
            f"{trained.corpus_fingerprint[:12]}) or a later version of it, got "
            f"{corpus} ({info['fingerprint'][:12]}); give another with {option}, or "
            "allow the mismatch (allow_corpus_mismatch)"
        )


def _find_pretrained(run: RecordedRun, given: str) -> RecordedRun | None:
    """Returns the run of pre-training that fine-tuning began with, if it is there."""
    if given:
        return require_finished(given, PRETRAIN.name, {})
    recorded = run.trained.source
    # Beside the model first: a chain may have been moved.
    beside = parent(run.model_dir)
    name = Path(recorded).name or PRETRAIN.name
    for place in (within(beside, name), recorded, within(beside, PRETRAIN.name)):
        found = open_run(place) if place else None
        if found is not None and found.trained.stage == PRETRAIN.name:
            return found
    return None


def ask_config(
    run: str | RecordedRun,
    given: Overrides = Overrides(),
    *,
    option: str = "--corpus FOLDER",
    **settings: Any,
) -> AskConfig:
    """Returns the configuration of `realm ask` for a run, with further settings of it.

    It reads no arrays. `run` is as in `find_model`, or what that has found, and
    `option` as in `find_corpus`.
    """
    model = run if isinstance(run, RecordedRun) else find_model(run)
    corpus, differs = find_corpus(
        model,
        given.corpus,
        allow_mismatch=given.allow_corpus_mismatch,
        option=option,
    )
    finetuned = answering_config(model, given)
    found = _find_pretrained(model, given.pretrained)
    # It embeds later versions; with two towers the model does so itself.
    is_needed = model.trained.model["shared"] or given.pretrained
    pretrained = found if is_needed else None
    return AskConfig(
        corpus=corpus,
        finetuned=finetuned,
        pretrained=pretrained.model_dir if pretrained else "",
        pretrained_checkpoint=model.trained.source_checkpoint if found else "last",
        fills_masks=found.model_dir if found and found.has_ended else "",
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
    starting_point: str = "",
    baselines: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
) -> EvaluateConfig:
    """Returns the configuration of `realm evaluate` for a run; reads no arrays.

    Of the folder of a chain every finished stage is measured, and `note` is called with
    a sentence on each that is left out; of the model directory of fine-tuning that
    model alone, or with the pre-training that is given or has to embed another corpus.
    The questions are those that the run recorded if none are given, and the report is
    in RUN/evaluate if no output is. The other arguments are those of `EvaluateConfig`.
    """
    model = find_model(run)
    corpus, differs = find_corpus(
        model, given.corpus, allow_mismatch=given.allow_corpus_mismatch
    )
    finetuned = answering_config(model, given)
    found = _find_pretrained(model, given.pretrained)
    is_chain = os.path.normpath(run) != os.path.normpath(model.model_dir)
    is_needed = given.pretrained or (differs and model.trained.model["shared"])
    measured = model
    if found and (is_needed or (is_chain and found.has_ended)):
        measured = found
    has_pretrained = measured is found
    warm_started = within(run, WARM_START.name) if is_chain else ""
    if warm_started and not _is_alike(warm_started, measured.trained, note):
        warm_started = ""
    return EvaluateConfig(
        model_dir=output or within(run, EVALUATE.name),
        corpus=corpus,
        questions=questions or _recorded_questions(model, found),
        finetuned=finetuned,
        models=models_of(measured),
        warm_started=warm_started,
        pretrained=measured.model_dir if has_pretrained else "",
        pretrained_checkpoint=model.trained.source_checkpoint,
        starting_point=starting_point,
        baselines=baselines,
        split=split,
        # Masked sentences are of the corpus that was trained on.
        masked_task=measured.trained.data_order["task"]
        if has_pretrained and not differs
        else "",
        searcher=finetuned.searcher,
        allow_corpus_mismatch=differs,
        title=Path(parent(model.model_dir) if is_chain else model.model_dir).name,
    )


def _is_alike(model_dir: str, wanted: Trained, note: Callable[[str], None]) -> bool:
    """Returns whether a warm start can be measured with the stages after it."""
    run = open_run(model_dir)
    if run is None or run.trained.stage != WARM_START.name or not run.has_ended:
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
    """Returns where the questions are that a stage held out."""
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
