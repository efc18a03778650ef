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
from realm_jax.index.follower import LoadedIndex
from realm_jax.index.reuse import DOCUMENT_CRC32C
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.storage import open_store
from realm_jax.training import finetune
from realm_jax.training.checkpoint_manifests import read_details
from realm_jax.training.checkpoints import Restored, restore_params
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.index_link import IndexSource
from realm_jax.training.initialization import describe


def open_finished(model_dir: str, stage: str, wanted: Mapping[str, Any]) -> Restored:
    """Reads the parameters that a finished stage ended with.

    Args:
      model_dir: of the run.
      stage: its name.
      wanted: what its checkpoint must say of the run.

    Raises:
      BadInputError: there is no such run, it is unfinished, damaged or another one.
    """
    store = open_store(model_dir)
    found = read_details(store)
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
    restored = restore_params(store)
    assert restored is not None
    if restored.step != step:
        raise BadInputError(
            f"expected checkpoint {step} of {model_dir} as it was written, but it is "
            f"damaged; run {stage} again, which replaces it"
        )
    return restored


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
    """

    config: FinetuneConfig
    run: Restored
    searcher: str
    embed: EmbedConfig
    began_as: PyTree | None = None
    pretrained: str = ""

    @classmethod
    def open(
        cls,
        config: FinetuneConfig,
        corpus: BlockStore,
        *,
        searcher: str,
        embed: EmbedConfig,
        another_corpus: bool = False,
        began_as: PyTree | None = None,
        pretrained: str = "",
    ) -> "FinetunedModel":
        """Reads the model.

        Args:
          config: how it was fine-tuned, and where.
          corpus: the one it was fine-tuned on.
          searcher: "device" or "scann".
          embed: how a missing index is made.
          another_corpus: whether `corpus` may be another one in the same vocabulary.
          began_as: parameters of the retriever that fine-tuning began with, if given.
          pretrained: where they are from.

        Raises:
          BadInputError: as `open_finished`.
        """
        wanted = {
            "model": describe(config.models.retriever_config(corpus.vocabulary.size)),
            "vocabulary_fingerprint": corpus.vocabulary.fingerprint,
            "lengths": dataclasses.asdict(config.models.lengths),
            **config.reading(),
        }
        if not another_corpus:
            wanted["corpus_fingerprint"] = corpus.fingerprint
        run = open_finished(config.model_dir, finetune.NAME, wanted)
        return cls(config, run, searcher, embed, began_as, pretrained)

    def has_index(self, corpus: BlockStore) -> bool:
        """Whether the index of a corpus need not be made."""
        return finetune.INDEX_STEP in self.source(corpus).series.steps()

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
        source, step = self.source(corpus), finetune.INDEX_STEP
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
        own = SnapshotSeries(source.model_store, INDEX_SERIES)
        if self.began_as is not None and finetune.INDEX_STEP in own.steps():
            manifest = own.read_manifest(finetune.INDEX_STEP)
            began_as = source.retriever(finetune.INDEX_STEP, self.began_as)
            if began_as.params_crc32c() == manifest.metadata[RETRIEVER_CRC32C]:
                return self.began_as
        raise BadInputError(
            f"expected in PRETRAINED the model that {self.config.model_dir} was "
            f"fine-tuned from, got {self.pretrained!r}: its one tower has moved since, "
            "and only that model can embed another corpus as it was embedded then"
        )
