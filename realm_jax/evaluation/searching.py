"""Opens the newest stage of a run to search its corpus, fine-tuned or not."""

from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation import adapt_report
from realm_jax.evaluation.ask import AskConfig, open_model
from realm_jax.evaluation.comparisons import BEFORE_TRAINING
from realm_jax.evaluation.loading import TrainedModel, open_finished
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
        checkpoint: str = "last",
        as_begun: bool = False,
    ) -> "PretrainedRetriever":
        """Reads the retriever of a finished run.

        `searcher` is "device", exact and the default, or "scann"; `checkpoint` is
        "last", or "best" by held-out utility. `as_begun` is `FinishedRun.as_begun`.
        """
        searcher = searcher or "device"
        require_one_of("SEARCHER", searcher, SEARCHERS)
        require_one_of("CHECKPOINT", checkpoint, Which)
        run = open_finished(recorded, recorded.trained.stage, {}, Which(checkpoint))
        if as_begun:
            run = run.as_begun()
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
    as_begun: bool = False,
    option: str = "--corpus FOLDER",
) -> tuple[TrainedModel, BlockStore]:
    """Opens the newest stage of a run, and the corpus that it searches.

    The run is the folder of a chain, or a model directory, or open. Of a chain that
    `realm adapt` has measured it is the retriever that was chosen. `given.corpus` is
    the directory of a corpus that is open. `checkpoint` is "last" or "best": of the run
    that is opened, or, if that is fine-tuned, of the one it was fine-tuned from
    (`given.pretrained`). `as_begun` is as in `PretrainedRetriever.open`, of a run that
    is open. `option` says in messages how a corpus is given.
    """
    recorded = run
    if not isinstance(recorded, RecordedRun):
        recorded, as_begun = find_retriever(recorded)
    place, differs = find_corpus(
        recorded,
        given.corpus,
        allow_mismatch=given.allow_corpus_mismatch,
        option=option,
    )
    if recorded.trained.stage != FINETUNE.name:
        model = PretrainedRetriever.open(
            recorded,
            searcher=given.searcher,
            checkpoint=checkpoint,
            as_begun=as_begun,
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
    return open_model(config, corpus, recorded), corpus
