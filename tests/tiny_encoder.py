"""Writes a small BERT of random weights as a folder that others publish."""

import flax.traverse_util
import numpy as np

from realm_jax.models.bert import BertConfig
from realm_jax.weights import bert as bert_weights
from realm_jax.weights import bert_tensors


def write_bert(folder, pieces, **sizes):
    """Writes one layer of 16 features, or of what `sizes` says, for a vocabulary."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(pieces))
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "mlp_size": 32}
    small |= {"max_positions": 128, "activation": "gelu"}
    config = BertConfig(len(pieces), **(small | sizes))
    rng = np.random.default_rng(0)
    flat = {
        name: rng.normal(0.0, 0.1, shape).astype(np.float32)
        for name, shape in bert_tensors.expected_shapes(config).items()
    }
    params = flax.traverse_util.unflatten_dict(flat, sep="/")
    bert_weights.save_bert(folder / "model.safetensors", params, config)
    bert_weights.save_config(folder, config)
    return config
