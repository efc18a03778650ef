"""Opens the newest stage of a run to search its corpus, fine-tuned or not."""

import dataclasses

from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation import adapt_report
from realm_jax.evaluation.ask import open_model
from realm_jax.evaluation.comparisons import BEFORE_TRAINING
from realm_jax.evaluation.loading import TrainedModel, open_finished
from realm_jax.evaluation.recorded import (
    SEARCHED,
    Overrides,
    ask_config,
    find_corpus,
    find_model,
    models_of,
    require_fine_tuned,
)
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import SEARCHERS
from realm_jax.stages import FINETUNE
from realm_jax.training.checkpoint_manifests import Which
from realm_jax.training.recorded import RecordedRun
from realm_jax.training.stage_config import require_one_of


class PretrainedRetriever(TrainedModel):
    """The retriever of a warm start or of REALM, which no reader answers with yet."""

    @classmethod
    def open(
        cls,
        recorded: RecordedRun,
        *,
        searcher: str = "",
        checkpoint: Which = Which.LAST,
        before_training: bool = False,
    ) -> "PretrainedRetriever":
        """Reads the retriever of a finished run.

        `searcher` is "device", exact and the default, or "scann"; the best checkpoint
        is that by held-out utility. With `before_training` it is the encoder that a
        warm start began with, see `FinishedRun.before_training`.
        """
        searcher = searcher or "device"
        require_one_of("SEARCHER", searcher, SEARCHERS)
        run = open_finished(recorded, recorded.trained.stage, {}, checkpoint)
        if before_training:
            run = run.before_training()
        return cls(
            run=run,
            models=models_of(recorded),
            searcher=searcher,
            embed=EmbedConfig(),
            index_step=run.step,
        )


def find_retriever(run: str) -> tuple[RecordedRun, bool]:
    """Returns the newest stage of a run, or what `realm adapt` has chosen of it.

    A fine-tuned model comes before either. True stands for the encoder that the stage
    began with.
    """
    newest = find_model(run, SEARCHED)
    chosen = adapt_report.chosen_of(run, newest)
    if chosen is None:
        return newest, False
    stage = adapt_report.STAGES_OF[chosen]
    return find_model(run, [stage]), chosen == BEFORE_TRAINING


def open_retriever(
    run: str | RecordedRun,
    given: Overrides,
    *,
    corpus: BlockStore | None = None,
    checkpoint: str = "last",
    before_training: bool = False,
    embeds_documents: bool = False,
    option: str = "--corpus FOLDER",
) -> tuple[TrainedModel, BlockStore]:
    """Opens the newest stage of a run, and the corpus that it searches.

    The run is the folder of a chain, or a model directory, or open. Of a chain that
    `realm adapt` has measured it is the retriever that was chosen. `given.corpus` is
    the directory of a corpus that is open.

    Args:
      checkpoint: "last" or "best", of a run that is not fine-tuned.
      before_training: as in `PretrainedRetriever.open`, of a run that is open.
      embeds_documents: whether `document_encoder` is needed, which for the corpus that
        was trained on costs reading what fine-tuning began with.
      option: how a corpus is given, in messages.
    """
    require_one_of("CHECKPOINT", checkpoint, Which)
    recorded = run
    if not isinstance(recorded, RecordedRun):
        recorded, before_training = find_retriever(recorded)
    require_fine_tuned(recorded, given)
    if recorded.trained.stage != FINETUNE.name:
        place, _ = find_corpus(
            recorded,
            given.corpus,
            allow_mismatch=given.allow_corpus_mismatch,
            option=option,
        )
        model = PretrainedRetriever.open(
            recorded,
            searcher=given.searcher,
            checkpoint=Which(checkpoint),
            before_training=before_training,
        )
        return model, corpus or BlockStore.open(place)
    config = ask_config(recorded, given, option=option)
    if not (config.allow_corpus_mismatch or embeds_documents):
        config = dataclasses.replace(config, pretrained=given.pretrained)
    corpus = corpus or BlockStore.open(config.corpus)
    return open_model(config, corpus, recorded), corpus
