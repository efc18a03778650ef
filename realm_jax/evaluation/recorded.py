"""Finds a trained model and its corpus from what training has recorded.

`realm ask RUN`, `realm search RUN` and `realm_jax.load` need no gin files: RUN is the
folder of a chain, such as runs/quickstart, or a model directory in it. Sizes, lengths,
corpus and starting point stand in the checkpoints.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realm_jax.data.blocks import read_info
from realm_jax.data.versions import is_version_of
from realm_jax.errors import BadInputError
from realm_jax.evaluation.ask import AskConfig
from realm_jax.evaluation.loading import recorded_config, require_finished
from realm_jax.settings import read_starts
from realm_jax.stages import FINETUNE, PRETRAIN, WARM_START, StageSpec
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import read_details
from realm_jax.training.finetune import ANSWERING

SEARCHED = (FINETUNE, PRETRAIN, WARM_START)
"""Stages whose retriever can be searched with, the last of a chain first."""

_CORPUS = "corpus"


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What a person says beside RUN; everything else is found.

    Attributes:
      corpus: the prepared corpus, or "".
      pretrained: the model directory that fine-tuning began with, or "".
      num_read: number of blocks read per question; None for the recorded number.
      searcher: "device" or "scann"; "" for the recorded one.
      allow_corpus_mismatch: whether `corpus` may be any corpus of the vocabulary.
    """

    corpus: str = ""
    pretrained: str = ""
    num_read: int | None = None
    searcher: str = ""
    allow_corpus_mismatch: bool = False


def find_model(
    run: str | os.PathLike[str], stages: Sequence[StageSpec] = (FINETUNE,)
) -> str:
    """Returns the model directory of a stage: RUN itself, or one in it.

    Args:
      run: the folder of a chain or a model directory; of gs://, the stages' folders
        have their usual names.
      stages: the stages that will do; of a chain, the first of them that it has.

    Raises:
      BadInputError: there is no such model, or several.
    """
    place = os.fspath(run)
    stage = stage_of(place)
    if stage in [spec.name for spec in stages]:
        return place
    if stage is not None:
        raise BadInputError(
            f"expected a fine-tuned model in {place}, got a run of {stage}; fine-tune "
            "it with `realm finetune` and name that folder, or use `realm search`"
        )
    if "://" not in place and not Path(place).is_dir():
        raise BadInputError(
            f"expected the folder of a chain, such as runs/quickstart, or of a "
            f"trained model, got {place}, which does not exist; correct the path"
        )
    stage_in = {folder: stage_of(folder) for folder in _folders(place)}
    for spec in stages:
        found = [folder for folder, name in stage_in.items() if name == spec.name]
        usual = within(place, spec.name)
        if usual in found:
            return usual
        if len(found) > 1:
            raise BadInputError(
                f"expected one run of `realm {spec.command}` in {place}, got "
                f"{', '.join(found)}; name one of them"
            )
        if found:
            return found[0]
    commands = " or ".join(f"`realm {spec.command}`" for spec in stages)
    raise BadInputError(
        f"expected a checkpoint of {commands} in {place} or a folder in it, found no "
        "checkpoint of it; train a model there, or name another folder"
    )


def find_corpus(
    model_dir: str,
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
      model_dir: model directory of a finished training stage.
      given: the corpus, or "".
      allow_mismatch: whether `given` may be any other corpus of the vocabulary.
      option: how a corpus is given, for messages.

    Returns:
      Its folder, and whether it differs from the one that was trained on.

    Raises:
      BadInputError: there is none, or it is of another vocabulary, or not a version of
        the one that was trained on.
    """
    _, details = require_finished(model_dir, stage_of(model_dir) or FINETUNE.name, {})
    if given:
        info = read_info(given)
        require_related(given, info, details, model_dir, allow_mismatch, option)
        return given, info["fingerprint"] != details["corpus_fingerprint"]
    places = [within(parent(model_dir), _CORPUS)]
    if recorded := details.get(ANSWERING, {}).get("corpus", ""):
        places.append(recorded)
    elif starts := read_starts(open_store(model_dir)):
        # Fine-tuning alone records it in its checkpoints.
        places.append(starts[-1].settings.get("corpus", ""))
    seen = []
    for place in dict.fromkeys(places):
        seen.append(f"no corpus in {place}")
        with contextlib.suppress(BadInputError):
            if read_info(place)["fingerprint"] == details["corpus_fingerprint"]:
                return place, False
            seen[-1] = f"another corpus in {place}"
    raise BadInputError(
        f"expected the corpus that {model_dir} was trained on "
        f"({details['corpus_fingerprint'][:12]}), found {' and '.join(seen)}; if it "
        f"lies elsewhere now, give {option}"
    )


def require_related(
    corpus: str | os.PathLike[str],
    info: Mapping[str, Any],
    details: Mapping[str, Any],
    model_dir: str,
    allow_mismatch: bool,
    option: str,
) -> None:
    """Checks that a model can answer from a corpus.

    Args:
      corpus: folder of the corpus.
      info: its corpus.json.
      details: of the model's checkpoint.
      model_dir: directory of the model.
      allow_mismatch: whether it may be any corpus of the model's vocabulary.
      option: how a corpus is given.

    Raises:
      BadInputError: it is of another vocabulary, or neither the corpus that was trained
        on nor a later version of it.
    """
    wanted, found = (
        of.get("vocabulary_fingerprint", "")[:12] for of in (details, info)
    )
    if wanted != found:
        raise BadInputError(
            f"expected a corpus with the vocabulary of {model_dir} (fingerprint "
            f"{wanted}), got {corpus} with {found}; prepare it with VOCABULARY set to "
            "the vocab.txt of the corpus that was trained on"
        )
    trained = details["corpus_fingerprint"]
    if allow_mismatch or info["fingerprint"] == trained:
        return
    if not is_version_of(corpus, trained):
        raise BadInputError(
            f"expected the corpus that {model_dir} was trained on (fingerprint "
            f"{trained[:12]}) or a later version of it, got {corpus} "
            f"({info['fingerprint'][:12]}); give another with {option}, or allow the "
            "mismatch (allow_corpus_mismatch)"
        )


def find_pretrained(model_dir: str, given: str = "") -> tuple[str, str]:
    """Finds the run of `realm pretrain` that fine-tuning began with.

    Args:
      model_dir: model directory of `realm finetune`.
      given: that run's directory, or "".

    Returns:
      Its directory, "" if there is none, and the checkpoint, "last" or "best".
    """
    _, details = require_finished(model_dir, FINETUNE.name, {})
    answering = details.get(ANSWERING, {})
    which = answering.get("pretrained_checkpoint", "last")
    recorded = answering.get("pretrained", "")
    # Beside the model first: a chain may have been moved.
    names = (Path(recorded).name or PRETRAIN.name, PRETRAIN.name)
    beside = [within(parent(model_dir), name) for name in names]
    for place in (given, beside[0], recorded, beside[1]):
        if place and (place == given or stage_of(place) == PRETRAIN.name):
            return place, which
    return "", which


def ask_config(run: str, given: Overrides = Overrides(), **settings: Any) -> AskConfig:
    """Returns the configuration of `realm ask` for a run; reads no arrays.

    Args:
      run: as in `find_model`.
      given: what is not to be found.
      **settings: of `AskConfig`, such as `port`.

    Raises:
      BadInputError: as `find_model`, `find_corpus` and `loading.recorded_config`.
    """
    model_dir = find_model(run)
    corpus, differs = find_corpus(
        model_dir, given.corpus, allow_mismatch=given.allow_corpus_mismatch
    )
    finetuned = recorded_config(
        model_dir, corpus=corpus, num_read=given.num_read, searcher=given.searcher
    )
    _, details = require_finished(model_dir, FINETUNE.name, {})
    pretrained, which = "", "last"
    if details["model"]["shared"] or given.pretrained:
        # It embeds later versions; with two towers the model does so itself.
        pretrained, which = find_pretrained(model_dir, given.pretrained)
    return AskConfig(
        corpus=corpus,
        finetuned=finetuned,
        pretrained=pretrained,
        pretrained_checkpoint=which,
        searcher=finetuned.searcher,
        allow_corpus_mismatch=differs,
        **settings,
    )


def stage_of(model_dir: str) -> str | None:
    """Returns the stage whose checkpoint a directory has; None if it has none."""
    found = read_details(open_store(model_dir))
    return None if found is None else str(found[1].get("stage", ""))


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
