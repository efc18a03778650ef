"""Reads and writes retriever snapshots, which the trainer publishes for the builder."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import google_crc32c
import jax
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.index.manifest import Manifest, MismatchedSnapshotError
from realm_jax.index.snapshot_writer import SnapshotWriter
from realm_jax.index.snapshots import RETRIEVER_SERIES, SnapshotSeries
from realm_jax.models import encoders
from realm_jax.models.retriever import QUERY_TOWER, Retriever, RetrieverConfig
from realm_jax.storage import Store

PARAMS_CRC32C = "params_crc32c"
"""Key in a retriever snapshot's metadata: checksum of its parameters."""

_PARAMS = "params.safetensors"
_DONORS = "donors"


@dataclasses.dataclass(frozen=True)
class TrainedRetriever:
    """A retriever at one training step, its parameters on the host or on a device.

    `donors` are model directories, as absolute paths or gs://, that may have an index
    by the same document tower, from which rows are copied.
    """

    step: int
    config: RetrieverConfig
    params: PyTree
    vocabulary_fingerprint: str
    donors: tuple[str, ...] = ()

    def params_crc32c(self) -> int:
        """Returns a checksum of the parameters, which tells repeated runs apart."""
        return _crc32c(flax.traverse_util.flatten_dict(self.params, sep="/"))

    def document_crc32c(self) -> int:
        """Returns a checksum of the parameters that embed documents.

        With two towers fine-tuning does not change it: it trains the query tower alone.
        """
        flat = flax.traverse_util.flatten_dict(self.params, sep="/")
        of_queries = f"{QUERY_TOWER}/"
        return _crc32c({k: v for k, v in flat.items() if not k.startswith(of_queries)})


def _crc32c(flat: Mapping[str, Any]) -> int:
    checksum = google_crc32c.Checksum()
    for name in sorted(flat):
        checksum.update(name.encode())
        checksum.update(np.ascontiguousarray(flat[name]).tobytes())
    return int.from_bytes(checksum.digest(), "big")


def publish_retriever(
    store: Store, retriever: TrainedRetriever, corpus_fingerprint: str
) -> Manifest:
    """Commits a retriever for the builder, and returns its manifest.

    A run that resumes from a checkpoint repeats some steps, and may publish the same
    retriever again. The existing snapshot is then kept, because the builder may be
    using it, and its manifest is returned.

    Raises:
      AlreadyCommittedError: another retriever has that step.
    """
    series = SnapshotSeries(store, RETRIEVER_SERIES)
    metadata = {
        "config": retriever.config.recorded(),
        "vocabulary_fingerprint": retriever.vocabulary_fingerprint,
        PARAMS_CRC32C: retriever.params_crc32c(),
    }
    if retriever.step in series.steps():
        manifest = series.read_manifest(retriever.step)
        same_corpus = manifest.corpus_fingerprint == corpus_fingerprint
        # Donors are not part of a retriever's identity.
        found = {k: v for k, v in manifest.metadata.items() if k != _DONORS}
        if same_corpus and found == metadata:
            return manifest
    writer = series.begin(
        retriever.step,
        corpus_fingerprint=corpus_fingerprint,
        metadata=metadata | {_DONORS: list(retriever.donors)},
    )
    write_params(writer, retriever.params)
    return writer.commit()


def load_retriever(store: Store, step: int) -> TrainedRetriever:
    """Returns the retriever that was published at a step.

    Raises:
      MissingObjectError: there is none, or it was deleted.
      DamagedSnapshotError: it differs from what was published.
    """
    series = SnapshotSeries(store, RETRIEVER_SERIES)
    manifest = series.read_manifest(step)
    series.verify(manifest)
    params = read_params(series, manifest)
    try:
        towers = dict(manifest.metadata["config"])
        bert = encoders.from_record(towers.pop("bert"))
        config = RetrieverConfig(bert=bert, **towers)
        vocabulary_fingerprint = manifest.metadata["vocabulary_fingerprint"]
    except (KeyError, TypeError) as error:
        raise MismatchedSnapshotError(
            f"expected a retriever snapshot with its configuration at step {step}, got "
            f"metadata without a valid one ({error!r}); publish it anew."
        ) from error
    _check_params(config, params, step)
    donors = tuple(manifest.metadata.get(_DONORS, ()))
    return TrainedRetriever(step, config, params, vocabulary_fingerprint, donors)


def write_params(writer: SnapshotWriter, params: Mapping[str, Any]) -> None:
    """Writes a parameter tree, nested dictionaries, as one safetensors file."""
    flat = flax.traverse_util.flatten_dict(dict(params), sep="/")
    arrays = {k: np.asarray(v, order="C") for k, v in jax.device_get(flat).items()}
    writer.write_file(_PARAMS, safetensors.numpy.save(arrays))


def read_params(series: SnapshotSeries, manifest: Manifest) -> dict[str, Any]:
    """Returns the parameter tree of a snapshot, nested dictionaries of NumPy arrays."""
    flat = safetensors.numpy.load(series.read_file(manifest, _PARAMS))
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def check_reads(
    retriever: TrainedRetriever, blocks: BlockStore, document_length: int
) -> None:
    """Checks that a retriever fits a corpus; raises MismatchedSnapshotError if not."""
    vocabulary = blocks.vocabulary
    if retriever.vocabulary_fingerprint != vocabulary.fingerprint:
        raise MismatchedSnapshotError(
            f"expected a retriever of vocabulary {vocabulary.fingerprint[:12]}, which "
            f"{blocks.directory} has, that of step {retriever.step} has "
            f"{retriever.vocabulary_fingerprint[:12]}; give the corpus it was trained "
            "on, or prepare this one with its vocabulary."
        )
    bert = retriever.config.bert
    length = document_length + len(retriever.config.document_prefix)
    if bert.vocab_size < vocabulary.size or bert.max_positions < length:
        raise MismatchedSnapshotError(
            f"expected a retriever of at least {vocabulary.size} wordpieces and "
            f"{length} positions, that of step {retriever.step} has "
            f"{bert.vocab_size} and {bert.max_positions}; enlarge the model or shorten "
            "the documents."
        )


def _check_params(config: RetrieverConfig, params: PyTree, step: int) -> None:
    ids = jax.ShapeDtypeStruct((1, 3), np.int32)
    variables = jax.eval_shape(Retriever(config).init, jax.random.key(0), ids, ids, ids)
    expected = _shapes(variables["params"])
    found = _shapes(params)
    if found != expected:
        wrong = sorted(
            name
            for name in expected.keys() | found.keys()
            if expected.get(name) != found.get(name)
        )
        raise MismatchedSnapshotError(
            f"expected the retriever of step {step} to have {wrong[0]} of shape "
            f"{expected.get(wrong[0])}, got {found.get(wrong[0])} ({len(wrong)} "
            "parameters differ); publish it anew."
        )


def _shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    return {name: tuple(array.shape) for name, array in flat.items()}
