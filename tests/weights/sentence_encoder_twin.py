"""What sentence-transformers does with an exported folder, slowly, in float64.

Written from its documentation and from BERT's paper; it knows only the files.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy
import scipy.special
import tokenizers


def read_json(path):
    return json.loads(path.read_text())


def read_weights(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


def encode(folder, inputs, prompt=""):
    """Embeds texts, and pairs (title, body), one at a time."""
    folder = pathlib.Path(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = read_json(folder / "sentence_bert_config.json")
    tokenizer.enable_truncation(settings["max_seq_length"], strategy="longest_first")
    modules = read_json(folder / "modules.json")
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    assert kinds[:2] == ["Transformer", "Pooling"]
    assert modules[0]["path"] == ""
    config, weights = read_json(folder / "config.json"), read_weights(folder)
    rows = []
    for text in inputs:
        first, *rest = [text] if isinstance(text, str) else text
        texts = [prompt + first, *rest]
        if settings["do_lower_case"]:
            texts = map(str.lower, texts)
        pieces = tokenizer.encode(*texts)
        x = bert(weights, config, pieces.ids, pieces.type_ids)
        for kind, module in zip(kinds[1:], modules[1:], strict=True):
            x = MODULES[kind](folder / module["path"], x)
        rows.append(x)
    return np.stack(rows)


def bert(weights, config, ids, segments):
    """The last hidden states, of one sequence without padding."""
    epsilon, heads = config["layer_norm_eps"], config["num_attention_heads"]

    def dense(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, x):
        scale, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return layer_norm(x, scale, bias, epsilon)

    of = "embeddings"
    x = weights[f"{of}.word_embeddings.weight"][ids]
    x = x + weights[f"{of}.position_embeddings.weight"][: len(ids)]
    x = x + weights[f"{of}.token_type_embeddings.weight"][segments]
    x = norm(f"{of}.LayerNorm", x)
    for layer in range(config["num_hidden_layers"]):
        of = f"encoder.layer.{layer}"
        query, key, value = (
            np.split(dense(f"{of}.attention.self.{name}", x), heads, axis=1)
            for name in ("query", "key", "value")
        )
        attended = []
        for q, k, v in zip(query, key, value, strict=True):
            weight = scipy.special.softmax(q @ k.T / np.sqrt(q.shape[1]), axis=1)
            attended.append(weight @ v)
        branch = dense(f"{of}.attention.output.dense", np.concatenate(attended, 1))
        x = norm(f"{of}.attention.output.LayerNorm", x + branch)
        hidden = gelu(config["hidden_act"], dense(f"{of}.intermediate.dense", x))
        x = norm(f"{of}.output.LayerNorm", x + dense(f"{of}.output.dense", hidden))
    return x


def gelu(name, x):
    if name == "gelu":
        return x * scipy.special.ndtr(x)
    assert name == "gelu_pytorch_tanh"
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(x, scale, bias, epsilon):
    mean = x.mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(axis=-1, keepdims=True) + epsilon) * scale + bias


def pooling(folder, x):
    config = read_json(folder / "config.json")
    modes = [name for name, value in config.items() if value is True]
    if modes == ["pooling_mode_cls_token"]:
        return x[0]
    assert modes == ["pooling_mode_mean_tokens"]
    return x.mean(axis=0)


def dense(folder, x):
    weights = read_weights(folder)
    x = weights["linear.weight"] @ x + weights["linear.bias"]
    activation = read_json(folder / "config.json")["activation_function"]
    return {
        "torch.nn.modules.linear.Identity": lambda x: x,
        "torch.nn.modules.activation.Tanh": np.tanh,
    }[activation](x)


def module_layer_norm(folder, x):
    """torch.nn.LayerNorm, whose epsilon sentence-transformers leaves as it is."""
    weights = read_weights(folder)
    return layer_norm(x, weights["norm.weight"], weights["norm.bias"], 1e-5)


def normalize(folder, x):
    return x / max(np.linalg.norm(x), 1e-12)


MODULES = {
    "Pooling": pooling,
    "Dense": dense,
    "Normalize": normalize,
    "LayerNorm": module_layer_norm,
}
