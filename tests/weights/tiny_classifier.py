"""A tiny token classifier as `transformers` would save it, for tests."""

import json

import numpy as np
import safetensors.numpy

from realm_jax.data.wordpiece import SPECIAL_PIECES

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
VOCABULARY = [
    *SPECIAL_PIECES,
    *("A", "b", "u", "n", "s", "e", "l", "세", "왕", "1", ",", "."),
    *("##n", "##s", "##k", "##u", "##r", "##t", "##e", "##ll", "##종", "##은", "##8"),
]
HIDDEN, HEADS, LAYERS, MLP, POSITIONS = 8, 2, 2, 12, 16
CONFIG = {
    "model_type": "bert",
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "id2label": {str(index): label for index, label in enumerate(LABELS)},
}


def tensors_of_torch():
    """Random tensors with the names and shapes of `BertForTokenClassification`."""
    shapes = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, outputs, inputs in (
            ("attention.self.query", HIDDEN, HIDDEN),
            ("attention.self.key", HIDDEN, HIDDEN),
            ("attention.self.value", HIDDEN, HIDDEN),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("attention.output.LayerNorm", HIDDEN, None),
            ("intermediate.dense", MLP, HIDDEN),
            ("output.dense", HIDDEN, MLP),
            ("output.LayerNorm", HIDDEN, None),
        ):
            prefix = f"encoder.layer.{layer}.{name}"
            shapes[f"{prefix}.weight"] = (outputs, inputs) if inputs else (outputs,)
            shapes[f"{prefix}.bias"] = (outputs,)
    shapes = {f"bert.{name}": shape for name, shape in shapes.items()}
    shapes |= {"classifier.weight": (len(LABELS), HIDDEN), "classifier.bias": (5,)}
    rng = np.random.default_rng(0)
    # Large biases would make every word look like every other.
    return {
        name: rng.normal(0, 0.2 if "bias" in name else 1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder, tensors):
    """Writes the files of a checkpoint into `folder` and returns it."""
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", "utf-8")
    return folder


def edit_tensors(folder, edit):
    """Changes the tensors of a checkpoint in place."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)
