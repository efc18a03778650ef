"""Opens the output of training: finished stages, fine-tuned models with their indexes.

`recorded_config` needs no gin files: it restores the configuration of a fine-tuned
model from its checkpoint.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import PyTree

from realm_jax.answering.reader import Answerer
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index.builder import RETRIEVER_CRC32C
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import DOCUMENT_CRC32C
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.index.source import FIRST_STEP, IndexSource, LoadedIndex
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.stages import FINETUNE
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import (
    Which,
    all_details,
    best_step,
    read_details,
)
from realm_jax.training.checkpoints import Restored, restore_params
from realm_jax.training.finetune import ANSWERING, FinetuneConfig
from realm_jax.training.initialization import ModelFactory, describe, described_models
from realm_jax.types import Lengths

_log = logging.getLogger(__name__)

# Settings that the details of every fine-tuned model provide.
_SETTINGS = (
    "task",
    "train_steps",
    "batch_size",
    "seed",
    "marginalization",
    "max_span",
    "span_layer_norm_epsilon",
)
_NUMERICS = ("dtype", "products")


def require_finished(
    model_dir: str, stage: str, wanted: Mapping[str, Any]
) -> tuple[int, Mapping[str, Any]]:
    """Checks the details of a run's newest checkpoint, without reading arrays.

    Args:
      model_dir: model directory of the run.
      stage: name of the stage.
      wanted: required entries of the checkpoint's details.

    Returns:
      The step that the stage ended with, and the checkpoint's details.

    Raises:
      BadInputError: there is no such run, it is unfinished, or its details differ.
    """
    found = read_details(open_store(model_dir))
    if found is None:
        raise BadInputError(
            f"expected a finished {stage} run in {model_dir}, found no checkpoint; "
            f"run that stage first"
        )
    step, details = found
    for name, value in {"stage": stage, **wanted}.items():
        for setting, expected, found in differences(name, value, details.get(name)):
            raise BadInputError(
                f"expected a run with {setting} {expected!r} in {model_dir}, got "
                f"{found!r}; give the model file, corpus and settings it has"
            )
    if step < details.get("train_steps", 0):
        raise BadInputError(
            f"expected a finished {stage} run in {model_dir}, found step {step} of "
            f"{details['train_steps']}; let it end first"
        )
    return step, details


def differences(name: str, expected: Any, found: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the settings that differ: its name, such as "model.bert", and both values.

    Args:
      name: name of a setting.
      expected: its value, or settings by name, which are compared one by one.
      found: the other value.
    """
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for inner in dict.fromkeys([*expected, *found]):
            values = expected.get(inner), found.get(inner)
            yield from differences(f"{name}.{inner}", *values)
    elif expected != found:
        yield name, expected, found


def open_finished(
    model_dir: str,
    stage: str,
    wanted: Mapping[str, Any],
    checkpoint: Which = Which.LAST,
) -> Restored:
    """Reads the last or the best parameters of a finished stage.

    Raises:
      BadInputError: as in `require_finished`, or the checkpoint is damaged; or the best
        one is requested, and none was measured.
    """
    step, _ = require_finished(model_dir, stage, wanted)
    restored = restore_params(open_store(model_dir), checkpoint)
    assert restored is not None
    if checkpoint is Which.LAST and restored.step != step:
        raise BadInputError(
            f"expected checkpoint {step} of {model_dir} as it was written, but it is "
            f"damaged; run {stage} again, which replaces it"
        )
    return restored


def require_alike(
    config: FinetuneConfig,
    control: str,
    corpus: BlockStore,
    *,
    allow_corpus_mismatch: bool = False,
) -> None:
    """Checks that two models were fine-tuned alike, so that they can be compared.

    Args:
      config: configuration of the one's fine-tuning, with its `model_dir`.
      control: model directory of the other.
      corpus: the corpus they were fine-tuned on.
      allow_corpus_mismatch: whether `corpus` may be another one with the same
        vocabulary.

    Raises:
      BadInputError: as in `require_finished`, or the two differ in the number of steps,
        the questions or their order.
    """
    wanted = _wanted(config, corpus, allow_corpus_mismatch)
    _, details = require_finished(config.model_dir, FINETUNE.name, wanted)
    _, of_control = require_finished(control, FINETUNE.name, wanted)
    for name in (*config.data_order(), "train_steps"):
        if details.get(name) != of_control.get(name):
            raise BadInputError(
                f"expected a control with {name} {details.get(name)!r} in {control}, "
                f"as in {config.model_dir}, got {of_control.get(name)!r}; fine-tune "
                "both alike"
            )


def _wanted(
    config: FinetuneConfig, corpus: BlockStore, allow_corpus_mismatch: bool
) -> dict[str, Any]:
    """Returns the required details of a fine-tuned model's checkpoint."""
    wanted = {
        "model": describe(config.models.retriever_config(corpus.vocabulary.size)),
        "vocabulary_fingerprint": corpus.vocabulary.fingerprint,
        "lengths": dataclasses.asdict(config.models.lengths),
        **config.reading(),
    }
    if not allow_corpus_mismatch:
        wanted["corpus_fingerprint"] = corpus.fingerprint
    return wanted


@dataclasses.dataclass(frozen=True)
class FinetunedModel:
    """A fine-tuned model, which can search the corpus it was trained on and others.

    Attributes:
      config: configuration of fine-tuning, with its `model_dir`.
      run: its parameters and the details of its checkpoint.
      searcher: "device" or "scann".
      embed: configuration for making a missing index.
      initial_retriever: parameters that its fine-tuning began with, or None.
      pretrained: model directory of these parameters, whose indexes may be reused.
      macro: macro that names this directory, for messages.
    """

    config: FinetuneConfig
    run: Restored
    searcher: str
    embed: EmbedConfig
    initial_retriever: PyTree | None = None
    pretrained: str = ""
    macro: str = "PRETRAINED"

    @classmethod
    def open(
        cls,
        config: FinetuneConfig,
        corpus: BlockStore,
        *,
        searcher: str,
        embed: EmbedConfig,
        allow_corpus_mismatch: bool = False,
        initial_retriever: PyTree | None = None,
        pretrained: str = "",
        macro: str = "PRETRAINED",
        checkpoint: Which = Which.BEST,
    ) -> "FinetunedModel":
        """Reads the model.

        Args:
          config: configuration of fine-tuning, with its `model_dir`.
          corpus: the corpus it was fine-tuned on.
          searcher: "device" or "scann".
          embed: configuration for making a missing index.
          allow_corpus_mismatch: whether `corpus` may be another one with the same
            vocabulary.
          initial_retriever: parameters that fine-tuning of the retriever began with,
            or None.
          pretrained: model directory of these parameters.
          macro: macro that names this directory.
          checkpoint: the last, or the best by exact match on dev; where that was not
            measured, the best is the last.

        Raises:
          BadInputError: as in `open_finished`.
        """
        wanted = _wanted(config, corpus, allow_corpus_mismatch)
        details = all_details(open_store(config.model_dir))
        chosen = checkpoint if best_step(details) is not None else Which.LAST
        run = open_finished(config.model_dir, FINETUNE.name, wanted, chosen)
        if run.step != max(details):
            _log.info(
                "%s: checkpoint %d of %d, the best of it by exact match on dev",
                *(config.model_dir, run.step, max(details)),
            )
        return cls(config, run, searcher, embed, initial_retriever, pretrained, macro)

    def has_index(self, corpus: BlockStore) -> bool:
        """Returns whether the index of a corpus exists."""
        return FIRST_STEP in self.source(corpus).series.steps()

    def index(
        self, corpus: BlockStore, stop: threading.Event | None = None
    ) -> LoadedIndex:
        """Loads the index of a corpus, or makes it for a corpus not trained on.

        Raises:
          BadInputError: the index that fine-tuning kept is missing, or the parameters
            needed to embed another corpus are; or an index of another document tower
            exists.
          DamagedSnapshotError: the index differs from what was committed.
          StoppedError: `stop` was set; the next call resumes.
        """
        source, step = self.source(corpus), FIRST_STEP
        found = source.load(step)
        if corpus.fingerprint == self.run.details.get("corpus_fingerprint"):
            if found is None:
                raise BadInputError(
                    f"expected the index of step {step} in {self.config.model_dir}, "
                    "found none; fine-tune again"
                )
            return found
        encoder = self._document_encoder(source)
        if found is None:
            return source.build(step, encoder, stop)
        # Compare the document tower alone: the query tower may have been trained since.
        made_by = found.manifest.metadata.get(DOCUMENT_CRC32C)
        if made_by != source.retriever(step, encoder).document_crc32c():
            where = source.series.store.url(f"{source.series.name}/commits/{step}.json")
            raise BadInputError(
                f"expected an index of the document tower that "
                f"{self.config.model_dir} was trained with, but {where} is of another; "
                "delete it to have the index made again"
            )
        return found

    def source(self, corpus: BlockStore) -> IndexSource:
        """Returns the source of a corpus's indexes, which loads and makes them."""
        models = self.config.models
        return IndexSource(
            open_store(self.config.model_dir),
            corpus,
            models.retriever_config(corpus.vocabulary.size),
            self.embed.at_length(models.lengths.document),
            self.searcher,
            donors=[self.pretrained] if self.pretrained else [],
        )

    @property
    def model_dir(self) -> str:
        """Directory of the run."""
        return self.config.model_dir

    @property
    def models(self) -> ModelFactory:
        """Sizes and lengths of its models."""
        return self.config.models

    def document_encoder(self, corpus: BlockStore) -> PyTree:
        """Returns the parameters of the retriever that embeds documents.

        Raises:
          BadInputError: fine-tuning has changed its tower, and `initial_retriever` is
            not what it began with.
        """
        return self._document_encoder(self.source(corpus))

    def require_began(self, corpus: BlockStore) -> None:
        """Checks by its index, if there is one, how fine-tuning began.

        Raises:
          BadInputError: it began with another retriever.
        """
        if self._began(self.source(corpus)) is False:
            raise BadInputError(
                f"expected in {self.config.model_dir} a model that was fine-tuned from "
                f"{self.pretrained} ({self.macro}), but it was from another one; name "
                "two stages of one chain"
            )

    def answerer(
        self, corpus: BlockStore, index: LoadedIndex, batch_size: int = 8
    ) -> Answerer:
        """Returns an answerer with this model, a corpus and its index."""
        config = self.config
        retriever = config.models.retriever_config(corpus.vocabulary.size)
        return Answerer(
            retriever=retriever,
            reader=config.make_reader(retriever.bert),
            params=self.run.tree,
            corpus=corpus,
            searcher=index.searcher,
            num_read=config.num_read,
            lengths=config.models.lengths,
            marginalization=AnswerMarginalization(config.marginalization),
            batch_size=batch_size,
        )

    def _document_encoder(self, source: IndexSource) -> PyTree:
        """Returns the retriever that embedded the documents of the kept index.

        A separate document tower is frozen in fine-tuning; a shared tower is not.

        Raises:
          BadInputError: that retriever is not available.
        """
        if not source.config.shared:
            return self.run.tree["retriever"]
        if self._began(source):
            return self.initial_retriever
        raise BadInputError(
            f"expected in {self.macro} the model that {self.config.model_dir} was "
            f"fine-tuned from, got {self.pretrained!r}: fine-tuning has changed its "
            "shared tower, and only that model embeds documents as in the kept index"
        )

    def _began(self, source: IndexSource) -> bool | None:
        """Returns whether it began with `initial_retriever`, None if unknown."""
        own = SnapshotSeries(source.model_store, INDEX_SERIES)
        if self.initial_retriever is None or FIRST_STEP not in own.steps():
            return None
        manifest = own.read_manifest(FIRST_STEP)
        initial_retriever = source.retriever(FIRST_STEP, self.initial_retriever)
        return initial_retriever.params_crc32c() == manifest.metadata[RETRIEVER_CRC32C]


def recorded_config(
    model_dir: str,
    *,
    corpus: str = "",
    num_read: int | None = None,
    searcher: str = "",
) -> FinetuneConfig:
    """Returns the configuration that a model directory records; reads no arrays.

    The checkpoint's details hold the sizes and lengths of the models, how spans are
    scored, and, under `finetune.ANSWERING`, the other settings that answering needs.
    Checkpoints written before that record existed lack it: settings without a safe
    default must then be given.

    Args:
      model_dir: folder or gs:// of a finished `realm finetune` run.
      corpus: the prepared corpus, "" for the recorded one.
      num_read: number of blocks read per question, None for the recorded number.
      searcher: "device" or "scann", "" for the recorded one. Without a record it is
        "device", which is exact.

    Raises:
      BadInputError: there is no finished fine-tuning run, its checkpoint lacks what is
        not given, num_read is below 1, or its settings are not those of this version.
    """
    _, details = require_finished(model_dir, FINETUNE.name, {})
    recorded = details.get(ANSWERING, {})
    given = {"corpus": corpus, "num_read": num_read, "searcher": searcher}
    chosen = {"searcher": "device", **recorded}
    chosen |= {name: value for name, value in given.items() if value not in ("", None)}
    missing = [name for name in given if name not in chosen]
    if missing:
        raise BadInputError(
            f"expected {' and '.join(missing)} in the checkpoint of {model_dir}, which "
            "was written before that was recorded; give "
            f"{' and '.join(f'{name}=' for name in missing)} as it was fine-tuned with"
        )
    if chosen["num_read"] < 1:
        raise BadInputError(
            f"expected num_read of at least 1 block, got {chosen['num_read']}; raise it"
        )
    numerics = {name: recorded[name] for name in _NUMERICS if name in recorded}
    models = recorded_models(model_dir, details, **numerics)
    with _settings_of_this_version(model_dir):
        settings = {name: details[name] for name in _SETTINGS}
    return FinetuneConfig(
        model_dir=model_dir,
        corpus=chosen["corpus"],
        models=models,
        searcher=chosen["searcher"],
        num_read=chosen["num_read"],
        # Nothing is trained here, so only the blocks that are read are retrieved.
        num_retrieved=chosen["num_read"],
        **settings,
    )


def recorded_models(
    model_dir: str, details: Mapping[str, Any], **numerics: str
) -> ModelFactory:
    """Returns the sizes and lengths of models that a checkpoint's details record.

    Args:
      model_dir: where the checkpoint is, for the message.
      details: its details.
      **numerics: as in `described_models`.

    Raises:
      BadInputError: they are not the settings of this version.
    """
    with _settings_of_this_version(model_dir):
        lengths = Lengths(**details["lengths"])
        return described_models(details["model"], lengths, **numerics)


@contextlib.contextmanager
def _settings_of_this_version(model_dir: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError) as error:
        raise BadInputError(
            f"expected the checkpoint of {model_dir} to record the settings that this "
            f"version has, got others ({error}); open it with the version it is of"
        ) from error
