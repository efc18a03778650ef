"""Reads a published model, whatever its layout.

config.json of model type "realm"   `realm.py`
"""

import pathlib

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json, require_fields
from realm_jax.weights.bert import CONFIG_FILE
from realm_jax.weights.realm import PublishedModel, is_realm, read_realm

__all__ = ["PublishedModel", "read_published"]


def read_published(source: str) -> PublishedModel:
    """Reads a model from a folder.

    Raises:
      BadInputError: it is of no known layout, or cannot be read.
    """
    path = pathlib.Path(source) / CONFIG_FILE
    try:
        config = parse_json(path.read_bytes())
        require_fields(config, {})
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected {CONFIG_FILE} of a published model in {source}, got none "
            f"({error}); give the folder of a model"
        ) from error
    if is_realm(config):
        return read_realm(source)
    raise BadInputError(
        f"expected a model of type realm in {path}, got "
        f"{config.get('model_type')!r:.80}; give another source"
    )
