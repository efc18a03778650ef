"""Searches with ScaNN on the threads of the host."""

import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
import tempfile
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from realm_jax import ranges
from realm_jax.errors import BadInputError
from realm_jax.extras import require_extra
from realm_jax.index.scann_tuning import (
    Visit,
    cheapest_visit,
    share_found,
    tree_shape,
    usual_leaves,
)
from realm_jax.index.search_inputs import (
    check_embeddings,
    check_query,
    sampled_blocks,
)
from realm_jax.types import Neighbours

SCANN_PURPOSE = "the searcher 'scann'"
"""For `require_extra`."""

_ABOUT = "searcher.json"
_SAMPLE = "sample.npy"
# Blocks of the sample. ScaNN's default, 50, dissolves most leaves of unequal size, and
# a search has to visit twice as many (docs/benchmarks.md).
_SMALLEST_LEAF = 10
# Candidates that are rescored in a tree that is not tuned.
_REORDERED = 200

_log = logging.getLogger(__name__)


class LowRecallError(BadInputError):
    """Raised when ScaNN's recall against exact search is too low."""


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """Configuration of ScaNN.

    The tree follows from the number of blocks (`scann_tuning.tree_shape`). What a
    search visits is chosen by `ScannSearcher.tune`, unless it is set here. A tree that
    is not tuned visits `scann_tuning.usual_leaves` and rescores 200 candidates.

    Attributes:
      brute_force_below: number of blocks below which every block is scored exactly,
        because a tree is not faster.
      recall: share of the best blocks of a query that a tuned searcher finds.
      searched_share: share of the tree's leaves that are searched; None to choose it.
      reordered: minimum number of quantized candidates that are rescored exactly; None
        to choose it.
    """

    brute_force_below: int = 20_000
    recall: float = 0.95
    searched_share: float | None = None
    reordered: int | None = None

    def __post_init__(self):
        ranges.require_ranges(
            self,
            brute_force_below=ranges.whole(0),
            recall=ranges.SHARE_ABOVE_0,
            searched_share=ranges.SHARE_ABOVE_0.or_none(),
            reordered=ranges.whole(1).or_none(),
        )


class ScannSearcher:
    """Searches on the host's threads; `visit` is None where every block is scored."""

    def __init__(
        self,
        embeddings: Float[np.ndarray, "block projection"],
        step: int = 0,
        config: ScannConfig = ScannConfig(),
    ):
        """Trains the tree and the quantizer if there are enough blocks for them."""
        check_embeddings(embeddings)
        self.step = step
        self.config = config
        self.num_blocks, self._dimension = embeddings.shape
        # Copied, because ScaNN does not return embeddings.
        self._sample = np.array(embeddings[sampled_blocks(self.num_blocks)])
        self.visit: Visit | None = None
        if self.num_blocks >= config.brute_force_below:
            self.visit = Visit(
                self._set_leaves() or usual_leaves(self.num_blocks),
                config.reordered or _REORDERED,
            )
        self._scann = _train_scann(embeddings, self.visit)

    def tune(
        self,
        queries: Float[np.ndarray, "query projection"],
        exact: Int[np.ndarray, "query k"],
        recall: float | None = None,
    ) -> None:
        """Chooses the cheapest search that finds the neighbours of these queries.

        A few hundred queries will do; `exact` are the ids of their k best blocks. If no
        search finds the share `recall` of these, a LowRecallError is raised, and the
        searcher stays as it is.
        """
        if self.visit is None:
            return
        recall = self.config.recall if recall is None else recall
        k = exact.shape[1]
        chosen = cheapest_visit(
            lambda visit: share_found(self._find(queries, k, visit)[0], exact),
            recall,
            num_blocks=self.num_blocks,
            num_leaves=tree_shape(self.num_blocks)[0],
            leaves=self._set_leaves(),
            reordered=self.config.reordered,
        )
        if chosen is None:
            raise LowRecallError(
                f"expected a search of ScaNN that finds {recall:.1%} of the {k} best "
                f"blocks of step {self.step}, got none that does; lower "
                "ScannConfig.recall, or leave ScannConfig.searched_share and "
                "ScannConfig.reordered unset."
            )
        self.visit = chosen
        _log.info(
            "ScaNN visits %d of %d leaves and rescores %d candidates for %.1f%%",
            chosen.leaves,
            tree_shape(self.num_blocks)[0],
            chosen.reordered,
            100 * recall,
        )

    def _set_leaves(self) -> int | None:
        share = self.config.searched_share
        if share is None:
            return None
        return max(1, round(tree_shape(self.num_blocks)[0] * share))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the trained searcher atomically to a new directory."""
        directory = pathlib.Path(directory)
        if directory.exists():
            raise BadInputError(
                f"expected to make {directory}, but it exists; choose another place."
            )
        about = {
            "step": self.step,
            "num_blocks": self.num_blocks,
            "dimension": self._dimension,
            "config": dataclasses.asdict(self.config),
            "visit": self.visit and dataclasses.asdict(self.visit),
        }
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            unfinished = pathlib.Path(scratch) / "searcher"
            unfinished.mkdir()
            self._scann.serialize(str(unfinished), relative_path=True)
            np.save(unfinished / _SAMPLE, self._sample)
            (unfinished / _ABOUT).write_text(json.dumps(about))
            os.replace(unfinished, directory)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "ScannSearcher":
        """Loads a searcher written by `save`, without training."""
        directory = pathlib.Path(directory)
        try:
            about = json.loads((directory / _ABOUT).read_text())
            sample = np.load(directory / _SAMPLE)
            trained = _import_scann_pybind().load_searcher(str(directory))
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInputError(
                f"expected a saved ScaNN searcher in {directory}, got {error!r}; "
                "build it again from the embeddings."
            ) from error
        searcher = cls.__new__(cls)
        searcher.step = about["step"]
        searcher.num_blocks = about["num_blocks"]
        searcher.config = ScannConfig(**about["config"])
        searcher.visit = _visit_from(about)
        searcher._dimension = about["dimension"]
        searcher._sample = sample
        searcher._scann = trained
        return searcher

    def search(
        self, query_embeddings: Float[Any, "batch projection"], k: int
    ) -> Neighbours:
        """See `Searcher.search`."""
        check_query(query_embeddings.shape, self._dimension, k)
        ids, scores = self._find(query_embeddings, k, self.visit)
        # ScaNN fills missing results with row 0 and a score of NaN.
        found = ~np.isnan(scores)
        return Neighbours(
            ids=np.where(found, ids.astype(np.int32), np.int32(-1)),
            scores=np.where(found, scores, np.float32(-np.inf)),
        )

    def _find(
        self, queries: Float[Any, "batch projection"], k: int, visit: Visit | None
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._scann.search_batched_parallel(
            np.ascontiguousarray(queries, np.float32),
            final_num_neighbors=k,
            pre_reorder_num_neighbors=visit and max(k, visit.reordered),
            leaves_to_search=visit and visit.leaves,
        )

    def sample(self) -> Float[np.ndarray, "sample projection"]:
        """See `Searcher.sample`."""
        return self._sample


def _train_scann(
    embeddings: Float[np.ndarray, "block projection"], visit: Visit | None
) -> Any:
    builder = _import_scann_pybind().builder(
        np.ascontiguousarray(embeddings, np.float32), 1, "dot_product"
    )
    if visit is None:
        return builder.score_brute_force().build()
    num_leaves, sample = tree_shape(len(embeddings))
    return (
        builder.tree(
            num_leaves,
            visit.leaves,
            training_sample_size=sample,
            min_partition_size=_SMALLEST_LEAF,
        )
        .score_ah(2, anisotropic_quantization_threshold=0.2)
        .reorder(visit.reordered)
        .build()
    )


def _visit_from(about: dict[str, Any]) -> Visit | None:
    """Returns what a saved searcher visits, also one that was saved before `tune`."""
    if "visit" in about:
        return about["visit"] and Visit(**about["visit"])
    config, num_blocks = about["config"], about["num_blocks"]
    if num_blocks < config["brute_force_below"]:
        return None
    # Its trees had this many leaves.
    searched = max(1, round(math.isqrt(num_blocks) * config["searched_share"]))
    return Visit(searched, config["reordered"])


def _import_scann_pybind() -> ModuleType:
    """Imports ScaNN without TensorFlow, which it would import if available.

    That import takes seconds, and is only needed for ScaNN's TensorFlow ops, which are
    not used here. An entry of None in `sys.modules` makes it fail, which ScaNN handles.
    """
    require_extra("scann", SCANN_PURPOSE)
    hidden = "tensorflow" not in sys.modules
    if hidden:
        sys.modules["tensorflow"] = None  # pyright: ignore[reportArgumentType]
    try:
        from scann.scann_ops.py import scann_ops_pybind
    finally:
        if hidden:
            del sys.modules["tensorflow"]
    return scann_ops_pybind
