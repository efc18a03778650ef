"""Searches with ScaNN on the threads of the host.

How much of a tree a search visits is chosen by measurement. The shape of the tree
follows from the number of blocks. How many of its leaves have to be visited does not:
it depends on how the queries lie among the blocks. ScaNN takes the numbers of leaves
and of rescored candidates with every search, so they are chosen for a tree that is
built, on queries whose neighbours are known.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from realm_jax import ranges
from realm_jax.errors import BadInputError
from realm_jax.extras import require_extra
from realm_jax.index.search_inputs import check_embeddings, check_query, sampled_blocks
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

# Blocks per leaf on which k-means is trained.
_TRAINED_ON_PER_LEAF = 60

# Candidates that are rescored: few lose neighbours to the error of the codes, which no
# number of leaves makes up for.
_RESCORED = (50, 100, 200, 400)

# Cost of reading and scoring a row, in codes that are scored meanwhile.
_CODES_PER_ROW = 25

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Visit:
    """What a search reads: codes of `leaves`, and rows of `reordered` candidates."""

    leaves: int
    reordered: int


class LowRecallError(BadInputError):
    """Raised when ScaNN's recall against exact search is too low."""


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """Configuration of ScaNN.

    The tree follows from the number of blocks (`tree_shape`). What a search visits is
    chosen by `ScannSearcher.tune`, unless it is set here. A tree that is not tuned
    visits `usual_leaves` and rescores 200 candidates.

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
        """Writes the trained searcher to a new directory."""
        directory = pathlib.Path(directory)
        directory.mkdir()
        about = {
            "step": self.step,
            "num_blocks": self.num_blocks,
            "dimension": self._dimension,
            "config": dataclasses.asdict(self.config),
            "visit": self.visit and dataclasses.asdict(self.visit),
        }
        self._scann.serialize(str(directory), relative_path=True)
        np.save(directory / _SAMPLE, self._sample)
        (directory / _ABOUT).write_text(json.dumps(about))

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


def tree_shape(num_blocks: int) -> tuple[int, int]:
    """Returns the number of leaves, and of the blocks that k-means is trained on."""
    leaves = min(num_blocks, 2 * math.isqrt(num_blocks))
    return leaves, min(num_blocks, _TRAINED_ON_PER_LEAF * leaves)


def usual_leaves(num_blocks: int) -> int:
    """Returns the number of leaves to visit where no queries are at hand.

    The share falls with the fourth root of the number of blocks, from 30 % of 32,570
    blocks of text (docs/benchmarks.md).
    """
    leaves, _ = tree_shape(num_blocks)
    return max(1, min(leaves, round(4 * leaves / num_blocks**0.25)))


def share_found(
    found: Int[np.ndarray, "query k"], exact: Int[np.ndarray, "query k"]
) -> float:
    """Returns recall@k: the share of the exact neighbours that were found."""
    pairs = zip(found, exact, strict=True)
    return float(np.mean([np.isin(wanted, row).mean() for row, wanted in pairs]))


def cheapest_visit(
    recall_of: Callable[[Visit], float],
    recall: float,
    *,
    num_blocks: int,
    num_leaves: int,
    leaves: int | None = None,
    reordered: int | None = None,
) -> Visit | None:
    """Returns the cheapest visit with this recall, None if there is none.

    Costs are counted, not timed, so that the same tree and queries give the same
    choice on every machine. Leaves are doubled until they are enough, then bisected:
    together the searches take some twenty times as long as the one that is chosen.
    """
    best = None
    for rescored in _RESCORED if reordered is None else [reordered]:
        # More leaves than this, and the visit would cost more than the best so far.
        most = num_leaves
        if best is not None:
            saved = (rescored - best.reordered) * _CODES_PER_ROW
            most = best.leaves - math.ceil(saved * num_leaves / num_blocks)
        few, most = (1, most) if leaves is None else (leaves, min(leaves, most))
        if few > most:
            break
        found = _least_visit(recall_of, recall, range(few, most + 1), rescored)
        best = found or best
    return best


def _least_visit(
    recall_of: Callable[[Visit], float], recall: float, leaves: range, reordered: int
) -> Visit | None:
    too_few, count = leaves.start - 1, leaves.start
    while recall_of(Visit(count, reordered)) < recall:
        if count == leaves[-1]:
            return None
        too_few, count = count, min(2 * count, leaves[-1])
    while count - too_few > 1:
        middle = (too_few + count) // 2
        if recall_of(Visit(middle, reordered)) >= recall:
            count = middle
        else:
            too_few = middle
    return Visit(count, reordered)
