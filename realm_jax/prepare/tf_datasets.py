"""Wraps NumPy functions for SeqIO, without logic of its own.

Importing this module imports TensorFlow, which takes seconds; training jobs do not
import it (see `examples.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.features import Example, FeatureSpecs
from realm_jax.errors import BadInputError


def output_features(
    specs: FeatureSpecs, vocab_size: int
) -> dict[str, seqio.ContinuousFeature]:
    """Returns SeqIO's description of the features of a task."""
    vocabulary = seqio.PassThroughVocabulary(size=vocab_size)
    return {
        name: seqio.ContinuousFeature(
            vocabulary=vocabulary,
            add_eos=False,
            dtype=tf.as_dtype(spec.dtype),
            rank=len(spec.shape),
        )
        for name, spec in specs.items()
    }


def expand(
    dataset: tf.data.Dataset,
    make_examples: Callable[..., Example],
    specs: FeatureSpecs,
    *,
    chunk_size: int = 64,
) -> tf.data.Dataset:
    """Makes examples from the elements of a dataset with a NumPy function.

    Args:
      make_examples: maps an array of scalars to any number of examples.

    Returns:
      A dataset with one element per example, in the order of the function's output.
    """

    def make_list(scalars: np.ndarray) -> list[np.ndarray]:
        examples = make_examples(scalars)
        return [examples[name] for name in specs]

    def from_numpy(scalars: tf.Tensor) -> dict[str, tf.Tensor]:
        types = [spec.dtype for spec in specs.values()]
        arrays = tf.numpy_function(make_list, [scalars], types)
        for spec, array in zip(specs.values(), arrays, strict=True):
            array.set_shape((None, *spec.shape))
        return dict(zip(specs, arrays, strict=True))

    return dataset.batch(chunk_size).map(from_numpy).unbatch()


def restore_shapes(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, Any] | None,
    specs: FeatureSpecs,
    columns: FeatureSpecs | None = None,
) -> tf.data.Dataset:
    """Restores the fixed shapes of examples, which SeqIO's cache does not store.

    A preprocessor to follow the cache. SeqIO then truncates features to
    `sequence_length`, which would remove the last [SEP]: shorter lengths are refused.
    Of `columns`, which are no part of the task's output, a cache may lack some.
    """
    if missing := sorted(specs.keys() - dataset.element_spec.keys()):
        raise BadInputError(
            f"expected a cache with the features {', '.join(specs)}, but it lacks "
            f"{', '.join(missing)}; remove it and run SeqIO's caching tool again."
        )
    for name, length in (sequence_length or {}).items():
        made = specs[name].shape[:1] if name in specs else ()
        if made and isinstance(length, int) and length < made[0]:
            raise BadInputError(
                f"expected a length of at least {made[0]} for {name}, which is what "
                f"the task was registered with, got {length}; register it with shorter "
                "lengths."
            )
    there = dataset.element_spec.keys()
    kept = {name: spec for name, spec in (columns or {}).items() if name in there}
    return dataset.map(
        lambda example: {
            name: tf.ensure_shape(example[name], spec.shape)
            for name, spec in {**specs, **kept}.items()
        }
    )


def numpy_batches(
    dataset: tf.data.Dataset, names: Sequence[str], batch_size: int
) -> Iterator[Example]:
    """Yields batches of the named features as NumPy arrays; the last may be smaller."""
    specs: Any = dataset.element_spec
    for name in names:
        if not specs[name].shape.is_fully_defined():
            raise BadInputError(
                f"expected examples of one shape, got {name} of shape "
                f"{specs[name].shape}; pad it to a fixed length in the task."
            )
    kept = dataset.map(lambda example: {name: example[name] for name in names})
    for batch in kept.batch(batch_size).as_numpy_iterator():
        yield {name: np.asarray(value) for name, value in batch.items()}
