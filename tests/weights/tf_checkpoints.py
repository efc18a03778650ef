"""Writes models of `transformers` as checkpoints of TensorFlow, by published names."""

import json
import re

import tensorflow as tf

from realm_jax.weights.tensors import read_tensors


def save(prefix, variables):
    """Writes a checkpoint of TensorFlow."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(variables),
        shape_and_slices=[""] * len(variables),
        tensors=list(map(tf.constant, variables.values())),
    )


def tf1_variable(name, value):
    """The name of a tensor of `transformers` in BERT of 2018, and its value there."""
    is_matrix = value.ndim == 2 and "embeddings" not in name
    name = name.replace("realm.", "bert.").replace("layer.", "layer_")
    name = name.replace("predictions.bias", "predictions.output_bias")
    name = re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
    name = re.sub(r"(LayerNorm|layer_normalization)\.bias$", r"\1.beta", name)
    name = name.replace("layer_normalization.weight", "layer_normalization.gamma")
    name = name.removesuffix(".weight") if "_embeddings" in name else name
    name = re.sub(r"\.weight$", ".kernel", name).replace(".", "/")
    return name, value.T if is_matrix else value


def variables_of(folder, within, without=()):
    """Variables of a model, each within the modules that `within` returns."""
    found = {}
    for name, value in read_tensors(folder).items():
        if name.endswith("decoder.weight") or name.startswith(tuple(without)):
            continue
        new, value = tf1_variable(name, value)
        found[within(new)] = value
    return found


def of_embedder(depth):
    def within(name):
        name = name.removeprefix("embedder/")
        is_bert = name.startswith(("bert/", "cls/predictions/"))
        name = name if is_bert else name.removeprefix("cls/")
        return "module/" * (depth + is_bert) + name

    return within


def of_openqa(name):
    if name.startswith("embedder/"):
        return of_embedder(3)(name)
    name = name.removeprefix("reader/")
    for theirs, new in (
        ("bert/", "module/bert/"),
        ("cls/", "module/cls/"),
        ("qa_outputs/dense_intermediate/", "dense/"),
        ("qa_outputs/dense_output/", "dense_1/"),
        ("qa_outputs/layer_normalization/", "layer_normalization/"),
    ):
        if name.startswith(theirs):
            return f"reader/{new}{name.removeprefix(theirs)}"
    raise ValueError(name)


def bert_config(folder, target):
    """The settings that BERT's code of 2018 has beside its checkpoints."""
    config = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += ("intermediate_size", "max_position_embeddings", "type_vocab_size")
    values = {name: config[name] for name in names} | {"hidden_act": "gelu"}
    target.write_text(json.dumps(values))
