"""The warm start: ICT for the retriever, masked-LM with its own block for the reader.

REALM, section 3.4: without it the retriever finds nothing of use, the reader learns to
ignore documents, and then no gradient reaches the retriever (the cold-start problem).
"""

import dataclasses
import threading
from typing import Any, ClassVar

from realm_jax.errors import BadInputError
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.training.loop import Report
from realm_jax.training.losses import WarmStartInputs, WarmStartLoss
from realm_jax.training.stage import Stage, StageConfig
from realm_jax.training.state import TrainState
from realm_jax.types import InverseClozeBatch, PretrainBatch

NAME = "warm_start"


@dataclasses.dataclass(frozen=True)
class WarmStartConfig(StageConfig):
    """A warm start; see `StageConfig` for the shared attributes.

    Attributes:
      task: masked sentences, for the reader.
      batch_size: sentence-block pairs per update; the more, the harder the choice.
      pairs_task: sentence-block pairs, for the retriever.
      reader_batch_size: masked sentences per update.
    """

    pairs_task: str = ""
    reader_batch_size: int = 512
    starts_from_nothing: ClassVar[bool] = True

    def data_order(self) -> dict[str, Any]:
        """Which examples each update sees, of both models."""
        return {
            **super().data_order(),
            "pairs_task": self.pairs_task,
            "reader_batch_size": self.reader_batch_size,
        }


def run(config: WarmStartConfig, report: Report, stop: threading.Event) -> bool:
    """Trains from the latest checkpoint on; returns whether all updates are done.

    Raises:
      BadInputError: as `Stage`.
    """
    stage = Stage(NAME, config, KnowledgeEncoder)
    if stage.is_done:
        return True
    pairs = stage.open_examples(config.pairs_task, "train")
    sentences = stage.open_examples(config.task, "train")
    if (sentences.features["source_block"][:1] < 0).any():
        raise BadInputError(
            f"expected sentences taken from the blocks of {config.corpus}, but task "
            f"{config.task!r} has none; the reader's warm start reads a sentence "
            "together with its own block"
        )

    def inputs_at(step: int, state: TrainState) -> WarmStartInputs:
        masked = stage.batch(sentences, step, config.reader_batch_size)
        joined_ids, joined_segment_ids = stage.corpus.joined_ids(
            masked["query_ids"],
            masked["source_block"][:, None],
            config.models.lengths.joined,
        )
        return WarmStartInputs(
            pairs=InverseClozeBatch(**stage.batch(pairs, step)),
            batch=PretrainBatch(**masked),
            joined_ids=joined_ids[:, 0],
            joined_segment_ids=joined_segment_ids[:, 0],
        )

    try:
        return stage.train(
            WarmStartLoss(stage.retriever, stage.reader, config.microbatches),
            inputs_at,
            report=report,
            stop=stop,
        )
    finally:
        stage.close()
