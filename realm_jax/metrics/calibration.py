"""Measures whether answers are right as often as their probabilities say."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from realm_jax.errors import BadInputError
from realm_jax.metrics.retrieval import Interval, bootstrap_interval


@dataclasses.dataclass(frozen=True)
class ConfidenceBin:
    """Predictions of similar confidence: its mean, and the share that is right."""

    confidence: float
    accuracy: Interval


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A reliability curve and its expected calibration error.

    Attributes:
      bins: those that hold predictions, by rising confidence.
      error: mean distance between confidence and accuracy, weighted by the
        predictions in a bin (Guo et al. 2017).
      confidence: mean probability over all predictions.
    """

    bins: Sequence[ConfidenceBin]
    error: float
    confidence: float


def calibrate(
    confidence: Float[np.ndarray, " prediction"],
    correct: Bool[np.ndarray, " prediction"],
    num_bins: int = 10,
) -> Calibration:
    """Compares probabilities with outcomes in bins of equal width.

    The bins are over 0..1; each includes its upper edge, and the first one 0.
    """
    confidence = np.asarray(confidence, np.float64)
    correct = np.asarray(correct, np.float64)
    if not len(confidence) or not ((confidence >= 0) & (confidence <= 1)).all():
        raise BadInputError(
            "expected probabilities between 0 and 1 of at least one prediction, got "
            f"{len(confidence)} from {confidence.min(initial=1)} to "
            f"{confidence.max(initial=0)}; evaluate a model that answers questions"
        )
    edges = np.linspace(0, 1, num_bins + 1)[1:-1]
    member = np.digitize(confidence, edges, right=True)
    bins, error = [], 0.0
    for index in np.unique(member):
        inside = member == index
        accuracy = bootstrap_interval(correct[inside])
        found = ConfidenceBin(float(confidence[inside].mean()), accuracy)
        error += inside.mean() * abs(found.confidence - accuracy.mean)
        bins.append(found)
    return Calibration(bins, float(error), float(confidence.mean()))
