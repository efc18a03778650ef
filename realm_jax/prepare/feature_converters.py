"""Between NumPy and SeqIO: thin wrappers, no logic of their own.

Importing this module imports TensorFlow, which takes seconds: a job that trains does
not (see `examples.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.features import Example, FeatureSpecs
from realm_jax.data.inverse_cloze import inverse_cloze_specs
from realm_jax.data.masking import pretrain_specs
from realm_jax.data.questions import question_specs
from realm_jax.errors import BadInputError


def output_features(
    specs: FeatureSpecs, vocab_size: int
) -> dict[str, seqio.ContinuousFeature]:
    """Returns what SeqIO wants to know of the features of a task."""
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
    """Makes examples of the elements of a dataset with a NumPy function.

    Args:
      dataset: elements are scalars.
      make_examples: from an array of scalars to any number of examples.
      specs: the features of one example.
      chunk_size: scalars per call.

    Returns:
      One element an example, in the order in which the function makes them.
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
) -> tf.data.Dataset:
    """Gives examples their fixed shapes again, for SeqIO's cache forgets lengths.

    A preprocessor for after the cache. SeqIO cuts features to `sequence_length` next,
    and would cut the last [SEP] off: shorter lengths are refused.

    Raises:
      BadInputError: a feature is asked for at less than the length it was made with,
        or the cache has not all features.
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
    return dataset.map(
        lambda example: {
            name: tf.ensure_shape(example[name], spec.shape)
            for name, spec in specs.items()
        }
    )


class RealmFeatureConverter(seqio.FeatureConverter):
    """Passes the features of a task to the model, padded to the lengths asked for.

    SeqIO wants a length of every feature: that of a scalar is None. Nothing can be
    packed. Subclasses name the features.
    """

    PACKING_FEATURE_DTYPES: Mapping[str, tf.dtypes.DType] | None = None

    def __init__(self, pack: bool = False, **options):
        """As `seqio.FeatureConverter`.

        Raises:
          BadInputError: `pack` is set.
        """
        if pack:
            raise BadInputError(
                "expected pack=False, got True: a query and its documents cannot share "
                "a sequence with others; set it to False."
            )
        super().__init__(pack=False, **options)

    def get_model_feature_lengths(
        self, task_feature_lengths: Mapping[str, int | None]
    ) -> Mapping[str, int | None]:
        """Returns the same lengths: features are passed as they are."""
        return dict(task_feature_lengths)

    def _convert_features(
        self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int | None]
    ) -> tf.data.Dataset:
        lengths = {
            name: length
            for name, length in task_feature_lengths.items()
            if length is not None
        }
        kept = ds.map(
            lambda example: {name: example[name] for name in task_feature_lengths}
        )
        return seqio.trim_and_pad_dataset(kept, lengths)


def _passed(specs: FeatureSpecs) -> dict[str, seqio.FeatureConverter.FeatureSpec]:
    return {
        name: seqio.FeatureConverter.FeatureSpec(
            dtype=tf.as_dtype(spec.dtype), rank=len(spec.shape)
        )
        for name, spec in specs.items()
    }


class PretrainFeatureConverter(RealmFeatureConverter):
    """Features of `types.PretrainBatch`; the id of the sentence is left out."""

    TASK_FEATURES = _passed(pretrain_specs())
    MODEL_FEATURES = TASK_FEATURES


class InverseClozeFeatureConverter(RealmFeatureConverter):
    """Features of `types.InverseClozeBatch`."""

    TASK_FEATURES = _passed(inverse_cloze_specs())
    MODEL_FEATURES = TASK_FEATURES


class QuestionFeatureConverter(RealmFeatureConverter):
    """Features of `types.QuestionBatch`."""

    TASK_FEATURES = _passed(question_specs())
    MODEL_FEATURES = TASK_FEATURES


def numpy_batches(
    dataset: tf.data.Dataset, names: Sequence[str], batch_size: int
) -> Iterator[Example]:
    """Yields batches of the named features as NumPy arrays; the last may be smaller.

    Raises:
      BadInputError: a feature has no fixed shape.
    """
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
