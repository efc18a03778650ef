"""The index of a run that is made once, from the retriever that the run starts with.

A warm start reads retrieved documents from it, and fine-tuning searches it to the end.
"""

import threading

from realm_jax.errors import BadInputError
from realm_jax.index.follower import LoadedIndex
from realm_jax.training.index_link import IndexSource
from realm_jax.training.stage import Stage

INDEX_STEP = 0
"""Of this index, in the model directory."""


def open_first_index(
    stage: Stage, source: IndexSource, stop: threading.Event, *, trained: str = ""
) -> LoadedIndex:
    """Opens the index, or makes it.

    Args:
      stage: of the run.
      source: of the index; `stage.index_source`.
      stop: ends embedding.
      trained: what of the document tower has trained on by the time a run resumes, in
        words; "" if nothing has, so that the index can be made anew.

    Raises:
      BadInputError: the run resumes, and its index is gone and cannot be made anew.
      StoppedError: stopped while the corpus was being embedded.
    """
    index = None if stage.details is None else source.load(INDEX_STEP)
    if index is None and stage.details is not None and trained:
        raise BadInputError(
            f"expected the index that this run started with in "
            f"{stage.model_store.url()}, found none, and its {trained} has trained on "
            "since; delete that folder and start anew"
        )
    # One that a run without a checkpoint left is used only if it is this retriever's.
    return index or source.build(INDEX_STEP, stage.state.params["retriever"], stop)
