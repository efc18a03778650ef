"""Says what the rows of a set of examples are, as examples.json states it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import FeatureSpecs
from realm_jax.data.inverse_cloze import PairRows
from realm_jax.data.masking import SpanRows
from realm_jax.data.random_masking import PieceRows
from realm_jax.data.references import SentenceRows
from realm_jax.manifests import require_fields

LAYOUT = "layout"
_ROWS, _KIND = "rows", "kind"
_WHOLE, _SENTENCES = "whole", "sentences"
_KINDS = {kind.kind: kind for kind in (PairRows, PieceRows, SpanRows)}


class References(NamedTuple):
    """What rows refer to.

    Attributes:
      layout: the kind of the rows.
      corpus: the blocks.
    """

    layout: SentenceRows
    corpus: BlockStore


def describe_layout(layout: SentenceRows | None) -> dict[str, Any]:
    """Returns the entry of a layout in examples.json; None is that of whole rows."""
    if layout is None:
        return {_ROWS: _WHOLE, "about": "A row has an array of each feature."}
    kind = {_ROWS: _SENTENCES, "about": f"{layout.about}.", _KIND: layout.kind}
    return {**kind, **dataclasses.asdict(layout)}


def parse_layout(entry: Any) -> SentenceRows | None:
    """Inverts `describe_layout`.

    Raises:
      ValueError: it is no such entry, or of a later release.
      BadInputError: its lengths leave no room for an example.
    """
    require_fields(entry, {_ROWS: str})
    if entry[_ROWS] == _WHOLE:
        return None
    require_fields(entry, {_KIND: str})
    if entry[_ROWS] != _SENTENCES or entry[_KIND] not in _KINDS:
        raise ValueError(f"rows of {entry[_ROWS]!r}, {entry[_KIND]!r}, are not known")
    kind = _KINDS[entry[_KIND]]
    names = [field.name for field in dataclasses.fields(kind)]
    require_fields(entry, dict.fromkeys(names, int))
    return kind(**{name: entry[name] for name in names})


def describe_specs(specs: FeatureSpecs) -> dict[str, Any]:
    """Returns the features of a batch as JSON values: dtype and shape of an example."""
    return {
        name: {"dtype": np.dtype(spec.dtype).name, "shape": list(spec.shape)}
        for name, spec in specs.items()
    }


def parse_specs(entries: Mapping[str, Any]) -> FeatureSpecs:
    """Inverts `describe_specs`; further entries are ignored.

    Raises:
      ValueError: an entry is none of a feature.
    """
    specs = {}
    for name, entry in entries.items():
        require_fields(entry, {"dtype": str, "shape": list})
        try:
            dtype, shape = np.dtype(entry["dtype"]), tuple(map(int, entry["shape"]))
            specs[name] = jax.ShapeDtypeStruct(shape, dtype)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name}: {error}") from error
    return specs
