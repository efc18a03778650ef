"""Opens finished stages, and fine-tuned models with their indexes."""

import dataclasses
import logging
import threading
from collections.abc import Mapping
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
from realm_jax.run_record import Trained, changes
from realm_jax.stages import FINETUNE
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import Which, best_step
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.finetune import AnsweringConfig, FinetuneConfig
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


def require_finished(
    model_dir: str, stage: str, wanted: Mapping[str, Any]
) -> RecordedRun:
    """Opens a run and checks it as `RecordedRun.require` does.

    Raises:
      BadInputError: there is no such run, it is unfinished, or its settings differ.
    """
    run = open_run(model_dir)
    if run is None:
        raise BadInputError(
            f"expected a finished {stage} run in {model_dir}, found no checkpoint; "
            f"run that stage first"
        )
    run.require(stage, wanted)
    return run


def open_finished(
    model_dir: str,
    stage: str,
    wanted: Mapping[str, Any],
    checkpoint: Which = Which.LAST,
) -> FinishedRun:
    """Reads the last or the best parameters of a finished stage.

    Raises:
      BadInputError: as in `require_finished` and `restore`.
    """
    return restore(require_finished(model_dir, stage, wanted), checkpoint)


def restore(run: RecordedRun, checkpoint: Which) -> FinishedRun:
    """Reads the last or the best parameters of a run that has ended.

    Raises:
      BadInputError: the checkpoint is damaged; or the best one is requested, and none
        was measured.
    """
    restored = restore_params(open_store(run.model_dir), checkpoint)
    assert restored is not None
    if checkpoint is Which.LAST and restored.step != run.step:
        raise BadInputError(
            f"expected checkpoint {run.step} of {run.model_dir} as it was written, but "
            f"it is damaged; run {run.trained.stage} again, which replaces it"
        )
    return FinishedRun(
        *(run.model_dir, run.trained, restored.step, restored.tree, restored.details)
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
    config: FinetuneConfig | AnsweringConfig,
    control: str,
    corpus: BlockStore,
    *,
    allow_corpus_mismatch: bool = False,
) -> None:
    """Checks that two models were fine-tuned alike, so that they can be compared.

    Raises:
      BadInputError: as in `require_finished`, or the two differ in the number of steps,
        the questions or their order.
    """
    wanted = wanted_of(
        config.models, corpus, allow_corpus_mismatch=allow_corpus_mismatch
    )
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


@dataclasses.dataclass(frozen=True)
class FinetunedModel:
    """A fine-tuned model, which can search the corpus it was trained on and others.

    Attributes:
      config: how it answers.
      run: its parameters, and what it was trained on.
      embed: configuration for making a missing index.
      began_with: the run that its fine-tuning began with, whose indexes may be reused;
        None where it is not named.
      macro: macro that names that run, for messages.
    """

    config: AnsweringConfig
    run: FinishedRun
    embed: EmbedConfig
    began_with: FinishedRun | None = None
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
        began_with: FinishedRun | None = None,
        macro: str = "PRETRAINED",
        checkpoint: Which = Which.BEST,
    ) -> "FinetunedModel":
        """Reads the model that was fine-tuned on a corpus.

        The searcher may differ from that of training, and the corpus if a mismatch is
        allowed, but for its vocabulary. Of checkpoints whose exact match on dev was not
        measured the best is the last.

        Raises:
          BadInputError: as in `open_finished`.
        """
        if isinstance(config, FinetuneConfig):
            config = config.answering()
        config = dataclasses.replace(config, searcher=searcher)
        wanted = wanted_of(
            config.models, corpus, allow_corpus_mismatch=allow_corpus_mismatch
        )
        wanted |= config.reading()
        recorded = require_finished(config.model_dir, FINETUNE.name, wanted)
        is_measured = best_step(recorded.checkpoints) is not None
        run = restore(recorded, checkpoint if is_measured else Which.LAST)
        if run.step != recorded.step:
            _log.info(
                "%s: checkpoint %d of %d, the best of it by exact match on dev",
                *(config.model_dir, run.step, recorded.step),
            )
        return cls(config, run, embed, began_with, macro)

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
        if corpus.fingerprint == self.run.trained.corpus_fingerprint:
            if found is None:
                raise BadInputError(
                    f"expected the index of step {step} in {self.config.model_dir}, "
                    "found none; fine-tune again"
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
            self.config.searcher,
            donors=[self.began_with.model_dir] if self.began_with else [],
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
        """Returns the retriever that embedded the documents of the kept index.

        A separate document tower is frozen in fine-tuning; a shared tower is not.

        Raises:
          BadInputError: fine-tuning has changed its tower, and `began_with` is not what
            it began with.
        """
        source = self.source(corpus)
        if not source.config.shared:
            return self.run.tree["retriever"]
        if self.began_with is not None and self._began(source):
            return self.began_with.tree["retriever"]
        named = self.began_with.model_dir if self.began_with else ""
        raise BadInputError(
            f"expected in {self.macro} the model that {self.config.model_dir} was "
            f"fine-tuned from, got {named!r}: fine-tuning has changed its shared "
            "tower, and only that model embeds documents as in the kept index"
        )

    def require_began(self, corpus: BlockStore) -> None:
        """Checks by its index, if there is one, how fine-tuning began.

        Raises:
          BadInputError: it began with another retriever.
        """
        if self.began_with and self._began(self.source(corpus)) is False:
            raise BadInputError(
                f"expected in {self.config.model_dir} a model that was fine-tuned from "
                f"{self.began_with.model_dir} ({self.macro}), but it was from another "
                "one; name two stages of one chain"
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

    def _began(self, source: IndexSource) -> bool | None:
        """Returns whether it began with `began_with`, None if unknown."""
        own = SnapshotSeries(source.model_store, INDEX_SERIES)
        if self.began_with is None or FIRST_STEP not in own.steps():
            return None
        manifest = own.read_manifest(FIRST_STEP)
        began = source.retriever(FIRST_STEP, self.began_with.tree["retriever"])
        return began.params_crc32c() == manifest.metadata[RETRIEVER_CRC32C]
