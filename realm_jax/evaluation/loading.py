"""Opens finished stages, and trained models with their indexes."""

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from realm_jax.answering.reader import Answerer
from realm_jax.answering.search import CorpusSearch
from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import TRAIN
from realm_jax.data.examples import Examples
from realm_jax.errors import BadInputError
from realm_jax.index.builder import RETRIEVER_CRC32C
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import DOCUMENT_CRC32C
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.index.source import FIRST_STEP, IndexSource, LoadedIndex
from realm_jax.models.retriever import tie_towers
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.run_record import Trained, changes
from realm_jax.stages import FINETUNE
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import Which, best_step
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.finetune import (
    MORE_TASKS,
    REFRESHES_INDEX,
    AnsweringConfig,
    FinetuneConfig,
)
from realm_jax.training.initialization import ModelFactory, describe
from realm_jax.training.recorded import RecordedRun, open_run

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A stage that has ended, with step, parameters and details of a checkpoint."""

    model_dir: str
    trained: Trained
    step: int
    tree: PyTree
    details: Mapping[str, Any]

    @property
    def has_learned_from_bm25(self) -> bool:
        """True for a warm start whose query tower has learned from BM25."""
        return bool(self.trained.data_order.get("bm25_weight"))

    def before_training(self) -> "FinishedRun":
        """Returns such a warm start with its query tower as it began."""
        tree = {**self.tree, "retriever": tie_towers(self.tree["retriever"])}
        return dataclasses.replace(self, step=FIRST_STEP, tree=tree)


def require_finished(
    run: str | RecordedRun, stage: str, wanted: Mapping[str, Any]
) -> RecordedRun:
    """Returns a run, opened if it is a directory, checked by `RecordedRun.require`."""
    found = run if isinstance(run, RecordedRun) else open_run(run)
    if found is None:
        raise BadInputError(
            f"expected a finished {stage} run in {run}, found no checkpoint; run that "
            "stage first"
        )
    found.require(stage, wanted)
    return found


def open_finished(
    run: str | RecordedRun,
    stage: str,
    wanted: Mapping[str, Any],
    checkpoint: Which = Which.LAST,
) -> FinishedRun:
    """Reads the last or the best parameters of a finished stage."""
    found = require_finished(run, stage, wanted)
    restored = restore_params(open_store(found.model_dir), checkpoint)
    assert restored is not None
    if checkpoint is Which.LAST and restored.step != found.step:
        raise BadInputError(
            f"expected checkpoint {found.step} of {found.model_dir} as it was written, "
            f"but it is damaged; run {stage} again, which replaces it"
        )
    return FinishedRun(
        found.model_dir,
        found.trained,
        restored.step,
        restored.tree,
        restored.details,
    )


def wanted_of(
    models: ModelFactory, corpus: BlockStore, *, allow_corpus_mismatch: bool
) -> dict[str, Any]:
    """Returns what a run must be of: models, lengths, vocabulary and corpus."""
    wanted = {
        "model": describe(models.retriever_config(corpus.vocabulary.size)),
        "vocabulary_fingerprint": corpus.vocabulary.fingerprint,
        "lengths": dataclasses.asdict(models.lengths),
    }
    if not allow_corpus_mismatch:
        wanted["corpus_fingerprint"] = corpus.fingerprint
    return wanted


def require_alike(
    config: FinetuneConfig | AnsweringConfig, control: str, wanted: Mapping[str, Any]
) -> None:
    """Checks that two models were fine-tuned alike, so that they can be compared."""
    ours, theirs = (
        {**run.trained.data_order, "train_steps": run.train_steps}
        for run in (
            require_finished(model_dir, FINETUNE.name, wanted)
            for model_dir in (config.model_dir, control)
        )
    )
    for change in changes(ours, theirs):
        raise BadInputError(
            f"expected a control with {change.name} {change.first!r} in {control}, as "
            f"in {config.model_dir}, got {change.second!r}; fine-tune both alike"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model that searches a corpus; its own retriever embeds documents.

    Attributes:
      index_step: step of the index that belongs to the model.
      donors: other runs whose indexes may be reused.
    """

    run: FinishedRun
    models: ModelFactory
    searcher: str
    embed: EmbedConfig
    index_step: int
    donors: Sequence[str] = ()

    def __post_init__(self):
        if "retriever" not in self.run.tree:
            raise BadInputError(
                f"expected a model with a retriever in {self.model_dir}, got one that "
                "was imported from a reader alone; import it again with an embedder"
            )

    @property
    def model_dir(self) -> str:
        """Directory of the run."""
        return self.run.model_dir

    def has_index(self, corpus: BlockStore) -> bool:
        """Returns whether the index of a corpus exists."""
        return self.index_step in self.source(corpus).series.steps()

    def index(
        self, corpus: BlockStore, stop: threading.Event | None = None
    ) -> LoadedIndex:
        """Loads the index of a corpus, or makes it in the model directory."""
        encoder = self.document_encoder(corpus)
        return self.source(corpus).load_or_build(self.index_step, encoder, stop)

    def source(self, corpus: BlockStore) -> IndexSource:
        """Returns the source of a corpus's indexes, which loads and makes them."""
        return IndexSource(
            open_store(self.model_dir),
            corpus,
            self.models.retriever_config(corpus.vocabulary.size),
            self.embed.at_length(self.models.lengths.document),
            self.searcher,
            donors=self.donors,
        )

    def document_encoder(self, corpus: BlockStore) -> PyTree:
        """Returns the parameters of the retriever that embeds a corpus."""
        return self.run.tree["retriever"]

    def corpus_search(
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetunedModel(TrainedModel):
    """A fine-tuned model, with the run that it began with where that is named.

    Attributes:
      refreshed: whether the index followed the retriever while it trained. Then that of
        the checkpoint is of its own parameters, as for any other stage.
      macro: macro that names `pretrained_run`, for messages.
    """

    config: AnsweringConfig
    refreshed: bool = False
    pretrained_run: FinishedRun | None = None
    macro: str = "PRETRAINED"

    @classmethod
    def open(
        cls,
        config: FinetuneConfig | AnsweringConfig,
        corpus: BlockStore,
        *,
        searcher: str,
        embed: EmbedConfig,
        allow_corpus_mismatch: bool = False,
        pretrained_run: FinishedRun | None = None,
        macro: str = "PRETRAINED",
        checkpoint: Which = Which.BEST,
        recorded: RecordedRun | None = None,
    ) -> "FinetunedModel":
        """Reads the model that was fine-tuned on a corpus.

        The searcher may differ from that of training, and the corpus if a mismatch is
        allowed, but for its vocabulary. Of checkpoints whose exact match on dev was not
        measured the best is the last. `recorded` is the run if it is open already.
        """
        if isinstance(config, FinetuneConfig):
            config = config.answering()
        wanted = wanted_of(
            config.models, corpus, allow_corpus_mismatch=allow_corpus_mismatch
        )
        wanted |= config.reading()
        recorded = require_finished(recorded or config.model_dir, FINETUNE.name, wanted)
        is_measured = best_step(recorded.checkpoints) is not None
        which = checkpoint if is_measured else Which.LAST
        run = open_finished(recorded, FINETUNE.name, {}, which)
        if run.step != recorded.step:
            _log.info(
                "%s: checkpoint %d of %d, the best of it by exact match on dev",
                config.model_dir,
                run.step,
                recorded.step,
            )
        refreshed = bool(run.trained.data_order.get(REFRESHES_INDEX))
        return cls(
            run=run,
            models=config.models,
            searcher=searcher,
            embed=embed,
            index_step=run.step if refreshed else FIRST_STEP,
            donors=[pretrained_run.model_dir] if pretrained_run else [],
            config=config,
            refreshed=refreshed,
            pretrained_run=pretrained_run,
            macro=macro,
        )

    def index(
        self, corpus: BlockStore, stop: threading.Event | None = None
    ) -> LoadedIndex:
        """Loads the index that fine-tuning kept, or makes that of another corpus.

        That of a checkpoint whose index was refreshed is made if it is not there.

        Raises:
          DamagedSnapshotError: the index differs from what was committed.
        """
        if self.refreshed:
            return super().index(corpus, stop)
        source, step = self.source(corpus), self.index_step
        found = source.load(step)
        if corpus.fingerprint == self.run.trained.corpus_fingerprint:
            if found is None:
                raise BadInputError(
                    f"expected the index of step {step} in {self.model_dir}, found "
                    "none; fine-tune again"
                )
            return found
        encoder = self.document_encoder(corpus)
        if found is None:
            return source.build(step, encoder, stop)
        # Compare the document tower alone: the query tower may have been trained since.
        made_by = found.manifest.metadata.get(DOCUMENT_CRC32C)
        if made_by != source.retriever(step, encoder).document_crc32c():
            where = source.series.store.url(f"{source.series.name}/commits/{step}.json")
            raise BadInputError(
                f"expected an index of the document tower that {self.model_dir} was "
                f"trained with, but {where} is of another; delete it to have the index "
                "made again"
            )
        return found

    def document_encoder(self, corpus: BlockStore) -> PyTree:
        """Returns the retriever that embedded the documents of the kept index.

        A separate document tower is frozen in fine-tuning; a shared tower is not. That
        of a refreshed index is the checkpoint's own.
        """
        source = self.source(corpus)
        if self.refreshed or not source.config.shared:
            return self.run.tree["retriever"]
        if self.pretrained_run is not None and self._began(source):
            return self.pretrained_run.tree["retriever"]
        named = self.pretrained_run.model_dir if self.pretrained_run else ""
        raise BadInputError(
            f"expected in {self.macro} the model that {self.model_dir} was fine-tuned "
            f"from, got {named!r}: fine-tuning has changed its shared tower, and only "
            "that model embeds documents as in the kept index"
        )

    def require_same_pretrained_run(self, corpus: BlockStore) -> None:
        """Checks by its index, if there is one, how fine-tuning began."""
        if self.pretrained_run and self._began(self.source(corpus)) is False:
            raise BadInputError(
                f"expected in {self.model_dir} a model that was fine-tuned from "
                f"{self.pretrained_run.model_dir} ({self.macro}), but it was from "
                "another one; name two stages of one chain"
            )

    def corpus_search(
        self, corpus: BlockStore, index: LoadedIndex, batch_size: int = 8
    ) -> Answerer:
        """Returns what searches a corpus by its index, and answers from it."""
        search = super().corpus_search(corpus, index, batch_size)
        return Answerer(
            **vars(search),
            reader=self.config.make_reader(search.retriever.bert),
            num_read=self.config.num_read,
            marginalization=AnswerMarginalization(self.config.marginalization),
            retrieval_weight=self.config.retrieval_weight,
        )

    def training_sets(self, corpus: BlockStore) -> list[Examples]:
        """Returns the examples of fine-tuning, in the corpus or beside its own.

        There are none where the sets are not at hand, where a version that kept no
        answers made them, and for imported models.
        """
        trained = self.run.trained
        task = trained.data_order.get("task")
        if not task:
            return []
        tasks = [task, *(trained.data_order.get(MORE_TASKS) or ())]
        wanted = {"vocabulary_fingerprint": trained.vocabulary_fingerprint}
        for place in dict.fromkeys((str(corpus.directory), trained.corpus)):
            folders = [Path(place, "examples", task, TRAIN) for task in tasks]
            if place and all(folder.is_dir() for folder in folders):
                sets = [Examples.open(folder, wanted) for folder in folders]
                if all("answer_texts" in examples.features for examples in sets):
                    return sets
        return []

    def _began(self, source: IndexSource) -> bool | None:
        """Returns whether it began with `pretrained_run`, None if unknown."""
        own = SnapshotSeries(source.model_store, INDEX_SERIES)
        if self.pretrained_run is None or FIRST_STEP not in own.steps():
            return None
        manifest = own.read_manifest(FIRST_STEP)
        began = source.retriever(FIRST_STEP, self.pretrained_run.tree["retriever"])
        return began.params_crc32c() == manifest.metadata[RETRIEVER_CRC32C]
