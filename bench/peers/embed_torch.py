"""Embeds documents in PyTorch or ONNX Runtime, for `bench.embed`; imports nothing of
this project.

    python -m bench.peers.embed_torch tuned CASE --dtype bfloat16

`transformers` encodes batches in the order given; the others sort by length first, as
sentence-transformers does. `tuned` uses scaled dot product attention, and `onnx` is
`transformers`' own model exported, its weights in eight bits with `--dtype int8`. The
folder CASE has `inputs.npz`, and MiniLM's weights as `transformers` reads them. Prints
one JSON object: seconds of each repetition, peak memory, and the file of embeddings.
"""

import argparse
import json
import pathlib
import resource
import tempfile
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional
from transformers import BertModel

Encode = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Maps ids and segments [batch, length] to means over wordpieces [batch, hidden]."""


def transformers_encoder(folder: pathlib.Path, dtype: torch.dtype) -> Encode:
    """Returns the encoder of `transformers`, as it comes."""
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval().to(dtype)

    def encode(ids: np.ndarray, segments: np.ndarray) -> np.ndarray:
        mask = torch.from_numpy(ids != 0)
        with torch.inference_mode():
            hidden = model(
                input_ids=torch.from_numpy(ids),
                attention_mask=mask.long(),
                token_type_ids=torch.from_numpy(segments),
            ).last_hidden_state
            return _mean(hidden, mask)

    return encode


def tuned_encoder(folder: pathlib.Path, dtype: torch.dtype) -> Encode:
    """Returns the same encoder, with fused attention and one product for its inputs."""
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval().to(dtype)
    heads = model.config.num_attention_heads
    joined = []
    for layer in model.encoder.layer:
        inner = layer.attention.self
        parts = inner.query, inner.key, inner.value
        joined.append(
            (
                torch.cat([part.weight for part in parts]).detach(),
                torch.cat([part.bias for part in parts]).detach(),
            )
        )

    def encode(ids: np.ndarray, segments: np.ndarray) -> np.ndarray:
        mask = torch.from_numpy(ids != 0)
        batch, length = ids.shape
        with torch.inference_mode():
            x = model.embeddings(
                input_ids=torch.from_numpy(ids),
                token_type_ids=torch.from_numpy(segments),
            )
            for layer, (weight, bias) in zip(model.encoder.layer, joined, strict=True):
                projected = functional.linear(x, weight, bias)
                query, key, value = projected.view(batch, length, 3, heads, -1).permute(
                    2, 0, 3, 1, 4
                )
                gathered = functional.scaled_dot_product_attention(
                    query, key, value, mask[:, None, None, :]
                )
                gathered = gathered.transpose(1, 2).reshape(batch, length, -1)
                x = layer.attention.output(gathered, x)
                x = layer.output(layer.intermediate(x), x)
            return _mean(x, mask)

    return encode


def onnx_encoder(folder: pathlib.Path, dtype: str, threads: int) -> Encode:
    """Returns the encoder of ONNX Runtime, exported and optimised."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "model.onnx"
        example = torch.ones(2, 16, dtype=torch.long)
        names = ["input_ids", "attention_mask", "token_type_ids"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (example, example, example),
                str(path),
                input_names=names,
                output_names=["hidden"],
                dynamic_axes={n: {0: "batch", 1: "length"} for n in (*names, "hidden")},
                dynamo=False,
            )
        if dtype == "int8":
            quantized = path.with_name("int8.onnx")
            quantize_dynamic(path, quantized)
            path = quantized
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )

    def encode(ids: np.ndarray, segments: np.ndarray) -> np.ndarray:
        mask = ids != 0
        given = dict(zip(names, (ids, mask.astype(np.int64), segments), strict=True))
        (hidden,) = session.run(None, given)
        return _mean(torch.from_numpy(hidden), torch.from_numpy(mask))

    return encode


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    weights = mask[..., None].to(hidden.dtype)
    return ((hidden * weights).sum(1) / weights.sum(1)).float().numpy()


def embed(
    encode: Encode, ids: np.ndarray, segments: np.ndarray, batch: int, *, sort: bool
) -> np.ndarray:
    """Returns the mean of every document; batches are padded to their longest."""
    lengths = (ids != 0).sum(-1)
    order = np.argsort(-lengths, kind="stable") if sort else np.arange(len(ids))
    rows = []
    for start in range(0, len(ids), batch):
        part = order[start : start + batch]
        longest = lengths[part].max()
        rows.append(encode(ids[part, :longest], segments[part, :longest]))
    return np.concatenate(rows)[np.argsort(order)]


def main():
    """Runs one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=("transformers", "tuned", "onnx"))
    parser.add_argument("case", type=pathlib.Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    if flags.peer == "onnx":
        encode = onnx_encoder(flags.case, flags.dtype, flags.threads)
    else:
        make = {"transformers": transformers_encoder, "tuned": tuned_encoder}
        encode = make[flags.peer](flags.case, getattr(torch, flags.dtype))
    inputs = np.load(flags.case / "inputs.npz")
    ids, segments = (inputs[name].astype(np.int64) for name in ("ids", "segments"))
    few = slice(0, 2 * flags.batch)
    embed(encode, ids[few], segments[few], flags.batch, sort=True)  # Warms up.
    seconds, means = [], np.zeros(0)
    for _ in range(flags.repetitions):
        began = time.perf_counter()
        means = embed(
            encode, ids, segments, flags.batch, sort=flags.peer != "transformers"
        )
        seconds.append(time.perf_counter() - began)
    np.save(flags.output, means)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "peak_gib": peak}))


if __name__ == "__main__":
    main()
