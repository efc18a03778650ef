"""Opens the newest stage of a run to search its corpus, fine-tuned or not."""

import dataclasses
import threading

from jaxtyping import PyTree

from realm_jax.answering.search import CorpusSearch
from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.ask import AskConfig, open_model
from realm_jax.evaluation.loading import FinetunedModel, FinishedRun, restore
from realm_jax.evaluation.recorded import (
    SEARCHED,
    Overrides,
    answering_config,
    find_corpus,
    find_model,
    models_of,
)
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import SEARCHERS
from realm_jax.index.source import IndexSource, LoadedIndex
from realm_jax.stages import FINETUNE
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import Which
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.recorded import RecordedRun
from realm_jax.training.stage_config import require_one_of


@dataclasses.dataclass(frozen=True)
class PretrainedRetriever:
    """The retriever of a warm start or of REALM, which no reader answers with yet.

    Attributes:
      model_dir: directory of the run.
      run: its parameters, and what it was trained on.
      models: sizes and lengths of its models.
      searcher: "device" or "scann".
    """

    model_dir: str
    run: FinishedRun
    models: ModelFactory
    searcher: str

    @classmethod
    def open(
        cls, recorded: RecordedRun, *, searcher: str = "", checkpoint: str = "last"
    ) -> "PretrainedRetriever":
        """Reads the retriever.

        Args:
          recorded: a finished run.
          searcher: "device" or "scann"; "" for "device", which is exact.
          checkpoint: "last", or "best" by held-out utility.

        Raises:
          BadInputError: as `loading.open_finished`; or its settings are not those of
            this version.
        """
        searcher = searcher or "device"
        require_one_of("SEARCHER", searcher, SEARCHERS)
        require_one_of("CHECKPOINT", checkpoint, Which)
        recorded.require(recorded.trained.stage, {})
        models = models_of(recorded)
        run = restore(recorded, Which(checkpoint))
        return cls(recorded.model_dir, run, models, searcher)

    def has_index(self, corpus: BlockStore) -> bool:
        """Returns whether the index of a corpus exists."""
        return self.run.step in self.source(corpus).series.steps()

    def index(
        self, corpus: BlockStore, stop: threading.Event | None = None
    ) -> LoadedIndex:
        """Loads the index of a corpus, or makes it in the model directory.

        Raises:
          BadInputError: the index there is of other parameters, or damaged.
          StoppedError: `stop` was set; the next call resumes.
        """
        params = self.run.tree["retriever"]
        return self.source(corpus).load_or_build(self.run.step, params, stop)

    def document_encoder(self, corpus: BlockStore) -> PyTree:
        """Returns the parameters of the retriever that embeds documents: its own."""
        return self.run.tree["retriever"]

    def source(self, corpus: BlockStore) -> IndexSource:
        """Returns the source of a corpus's indexes, which loads and makes them."""
        return IndexSource(
            open_store(self.model_dir),
            corpus,
            self.models.retriever_config(corpus.vocabulary.size),
            EmbedConfig().at_length(self.models.lengths.document),
            self.searcher,
        )

    def answerer(
        self, corpus: BlockStore, index: LoadedIndex, batch_size: int = 8
    ) -> CorpusSearch:
        """Returns what searches a corpus by its index; there is no reader to answer."""
        return CorpusSearch(
            retriever=self.models.retriever_config(corpus.vocabulary.size),
            params=self.run.tree,
            corpus=corpus,
            searcher=index.searcher,
            lengths=self.models.lengths,
            batch_size=batch_size,
        )


def open_retriever(
    run: str | RecordedRun,
    given: Overrides,
    *,
    corpus: BlockStore | None = None,
    checkpoint: str = "last",
    option: str = "--corpus FOLDER",
) -> tuple[FinetunedModel | PretrainedRetriever, BlockStore]:
    """Opens the newest stage of a run, and the corpus that it searches.

    Args:
      run: the folder of a chain, or a model directory, or what is recorded of it.
      given: what is not to be found.
      corpus: the corpus, if it is open already; `given.corpus` is its directory then.
      checkpoint: "last" or "best": of the run that is opened, or, if that is
        fine-tuned, of the one it was fine-tuned from (`given.pretrained`).
      option: how a corpus is given, for messages.

    Raises:
      BadInputError: as `recorded.find_model`, `recorded.find_corpus`,
        `RecordedRun.answering` and `loading.open_finished`.
    """
    recorded = run if isinstance(run, RecordedRun) else find_model(run, SEARCHED)
    place, differs = find_corpus(
        recorded,
        given.corpus,
        allow_mismatch=given.allow_corpus_mismatch,
        option=option,
    )
    if recorded.trained.stage != FINETUNE.name:
        model = PretrainedRetriever.open(
            recorded, searcher=given.searcher, checkpoint=checkpoint
        )
        return model, corpus or BlockStore.open(place)
    finetuned = answering_config(recorded, given)
    config = AskConfig(
        corpus=place,
        finetuned=finetuned,
        pretrained=given.pretrained,
        pretrained_checkpoint=checkpoint,
        searcher=finetuned.searcher,
        allow_corpus_mismatch=differs,
    )
    corpus = corpus or BlockStore.open(place)
    return open_model(config, corpus), corpus
