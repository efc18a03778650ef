"""Opens what training left: finished stages, and a fine-tuned model with its index."""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from jaxtyping import PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.evaluation.answering import Answerer
from realm_jax.index.builder import RETRIEVER_CRC32C
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import DOCUMENT_CRC32C
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.index.source import FIRST_STEP, IndexSource, LoadedIndex
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.storage import open_store
from realm_jax.training import finetune
from realm_jax.training.checkpoint_manifests import Which, read_details
from realm_jax.training.checkpoints import Restored, restore_params
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.initialization import describe


def require_finished(
    model_dir: str, stage: str, wanted: Mapping[str, Any]
) -> tuple[int, Mapping[str, Any]]:
    """Checks what the newest checkpoint of a run says of it; reads no array.

    Args:
      model_dir: of the run.
      stage: its name.
      wanted: what its checkpoint must say of the run.

    Returns:
      The step that the stage ended with, and all that is said of it.

    Raises:
      BadInputError: there is no such run, it is unfinished or another one.
    """
    found = read_details(open_store(model_dir))
    if found is None:
        raise BadInputError(
            f"expected a finished {stage} run in {model_dir}, found no checkpoint; "
            f"run that stage first"
        )
    step, details = found
    for name, value in {"stage": stage, **wanted}.items():
        if details.get(name) != value:
            raise BadInputError(
                f"expected a run with {name} {value!r} in {model_dir}, got "
                f"{details.get(name)!r}; give the model file, corpus and settings it "
                "has"
            )
    if step < details.get("train_steps", 0):
        raise BadInputError(
            f"expected a finished {stage} run in {model_dir}, found step {step} of "
            f"{details['train_steps']}; let it end first"
        )
    return step, details


def open_finished(
    model_dir: str,
    stage: str,
    wanted: Mapping[str, Any],
    checkpoint: Which = Which.LAST,
) -> Restored:
    """Reads the parameters that a finished stage ended with, or its best ones.

    Raises:
      BadInputError: as `require_finished`, or the checkpoint is damaged; or the best
        one is asked for, and none was measured.
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
    """Checks that a difference between two models is not one of their fine-tuning.

    Args:
      config: how the one was fine-tuned, and where.
      control: model directory of the other.
      corpus: the one they were fine-tuned on.
      allow_corpus_mismatch: whether `corpus` may be another one in the same vocabulary.

    Raises:
      BadInputError: as `require_finished`, or the other one was fine-tuned for longer,
        on other questions, or in another order.
    """
    wanted = _wanted(config, corpus, allow_corpus_mismatch)
    _, details = require_finished(config.model_dir, finetune.NAME, wanted)
    _, of_control = require_finished(control, finetune.NAME, wanted)
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
    """What the checkpoint of a fine-tuned model must say of it."""
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
      config: how it was fine-tuned, and where.
      run: its parameters and what its checkpoint says.
      searcher: "device" or "scann".
      embed: how a missing index is made.
      began_as: parameters of the retriever that fine-tuning began with, if given.
      pretrained: model directory they are from, whose indexes may be of use.
      macro: that names it, for messages.
    """

    config: FinetuneConfig
    run: Restored
    searcher: str
    embed: EmbedConfig
    began_as: PyTree | None = None
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
        began_as: PyTree | None = None,
        pretrained: str = "",
        macro: str = "PRETRAINED",
    ) -> "FinetunedModel":
        """Reads the model.

        Args:
          config: how it was fine-tuned, and where.
          corpus: the one it was fine-tuned on.
          searcher: "device" or "scann".
          embed: how a missing index is made.
          allow_corpus_mismatch: whether `corpus` may be another one in the same
            vocabulary.
          began_as: parameters of the retriever that fine-tuning began with, if given.
          pretrained: where they are from.
          macro: that says so.

        Raises:
          BadInputError: as `open_finished`.
        """
        wanted = _wanted(config, corpus, allow_corpus_mismatch)
        run = open_finished(config.model_dir, finetune.NAME, wanted)
        return cls(config, run, searcher, embed, began_as, pretrained, macro)

    def has_index(self, corpus: BlockStore) -> bool:
        """Whether the index of a corpus need not be made."""
        return FIRST_STEP in self.source(corpus).series.steps()

    def index(
        self, corpus: BlockStore, stop: threading.Event | None = None
    ) -> LoadedIndex:
        """Loads the index of a corpus; makes it if it is not the one trained on.

        Raises:
          BadInputError: the index that fine-tuning kept is gone, or the parameters that
            could embed another corpus are.
          DamagedSnapshotError: it is not what was committed.
          StoppedError: asked to stop; the next call goes on.
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
        # The query tower may have trained on since; no document is embedded by it.
        made_by = found.manifest.metadata.get(DOCUMENT_CRC32C)
        if made_by != source.retriever(step, encoder).document_crc32c():
            where = source.series.store.url(f"{source.series.name}/commits/{step}.json")
            raise BadInputError(
                f"expected an index of the document tower that "
                f"{self.config.model_dir} was trained with, but {where} is of another; "
                "delete it, and it will be made anew"
            )
        return found

    def source(self, corpus: BlockStore) -> IndexSource:
        """Where the indexes of a corpus lie, and what they are made of."""
        models = self.config.models
        return IndexSource(
            open_store(self.config.model_dir),
            corpus,
            models.retriever_config(corpus.vocabulary.size),
            self.embed.at_length(models.lengths.document),
            self.searcher,
            donors=[self.pretrained] if self.pretrained else [],
        )

    def require_began(self, corpus: BlockStore) -> None:
        """Checks that fine-tuning began with `began_as`, as far as its index says so.

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
        """The model over a corpus and its index."""
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
        """The retriever that embeds documents as those of the kept index were.

        The document tower is still the same, if there is one; a shared tower moved on.

        Raises:
          BadInputError: that retriever is not at hand.
        """
        if not source.config.shared:
            return self.run.tree["retriever"]
        if self._began(source):
            return self.began_as
        raise BadInputError(
            f"expected in {self.macro} the model that {self.config.model_dir} was "
            f"fine-tuned from, got {self.pretrained!r}: its one tower has moved since, "
            "and only that model can embed another corpus as it was embedded then"
        )

    def _began(self, source: IndexSource) -> bool | None:
        """Whether fine-tuning began with `began_as`; None if nothing says so."""
        own = SnapshotSeries(source.model_store, INDEX_SERIES)
        if self.began_as is None or FIRST_STEP not in own.steps():
            return None
        manifest = own.read_manifest(FIRST_STEP)
        began_as = source.retriever(FIRST_STEP, self.began_as)
        return began_as.params_crc32c() == manifest.metadata[RETRIEVER_CRC32C]
