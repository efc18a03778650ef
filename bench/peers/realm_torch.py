"""REALM's update in PyTorch, for `bench.train_step`; imports nothing of this project.

    python -m bench.peers.realm_torch transformers CASE --steps 5

`transformers` is the update of its REALM; `tuned` is one written for speed: scaled dot
product attention, the masked-LM head at the masked positions alone, and a fused AdamW.
Both start from the same weights and take the same inputs, which are in the folder
CASE: `inputs.npz`, `shape.json`, and `retriever` and `reader` as safetensors. Prints
one JSON object: the loss without dropout, seconds of each update and peak memory.
"""

import argparse
import contextlib
import json
import math
import pathlib
import resource
import time

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

DROPOUT = 0.1


class Attention(nn.Module):
    """Self-attention by the fused kernel; its weights are not dropped out."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )

    def forward(self, x, mask):
        """Returns the attention output of [batch, length, hidden]."""
        batch, length, hidden = x.shape

        def split(y):
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        gathered = functional.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), mask
        )
        return self.output(gathered.transpose(1, 2).reshape(batch, length, hidden))


class Layer(nn.Module):
    """A layer of BERT."""

    def __init__(self, hidden, heads, mlp):
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.mlp_input = nn.Linear(hidden, mlp)
        self.mlp_output = nn.Linear(mlp, hidden)
        self.mlp_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x, mask):
        """Returns the next layer's input."""
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        hidden = functional.gelu(self.mlp_input(x), approximate="tanh")
        return self.mlp_norm(x + self.dropout(self.mlp_output(hidden)))


class Bert(nn.Module):
    """BERT's encoder."""

    def __init__(self, shape):
        super().__init__()
        hidden = shape["hidden"]
        self.tokens = nn.Embedding(shape["vocabulary"], hidden)
        self.positions = nn.Embedding(512, hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.ModuleList(
            Layer(hidden, shape["heads"], shape["mlp"]) for _ in range(shape["layers"])
        )
        self.pooler = nn.Linear(hidden, hidden)

    def forward(self, ids, segments):
        """Returns hidden states [batch, length, hidden]."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        x = self.dropout(self.norm(x + self.segments(segments)))
        mask = (ids != 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return x


# The names of `transformers` for the parts of a tuned layer.
_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_input": "intermediate.dense",
    "mlp_output": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_BERT = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}


def _bert_tensors(bert, tensors):
    state = {}
    for name in bert.state_dict():
        owner, _, kind = name.rpartition(".")
        if owner.startswith("layers."):
            _, number, part = owner.split(".", 2)
            source = f"bert.encoder.layer.{number}.{_LAYER[part]}.{kind}"
        else:
            source = f"bert.{_BERT[owner]}.{kind}"
        state[name] = tensors[source]
    return state


class Tuned(nn.Module):
    """Retriever, reader and the marginal likelihood, written for speed."""

    def __init__(self, shape, retriever, reader):
        super().__init__()
        hidden = shape["hidden"]
        self.tower, self.reader = Bert(shape), Bert(shape)
        self.projection = nn.Linear(hidden, shape["projection"])
        self.projection_norm = nn.LayerNorm(shape["projection"], eps=1e-12)
        self.head, self.head_norm = (
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden, eps=1e-12),
        )
        self.head_bias = nn.Parameter(torch.zeros(shape["vocabulary"]))
        self.tower.load_state_dict(_bert_tensors(self.tower, retriever))
        self.reader.load_state_dict(_bert_tensors(self.reader, reader))
        transform = "cls.predictions.transform"
        for module, tensors, source in (
            (self.projection, retriever, "cls.dense"),
            (self.projection_norm, retriever, "cls.LayerNorm"),
            (self.head, reader, f"{transform}.dense"),
            (self.head_norm, reader, f"{transform}.LayerNorm"),
        ):
            kinds = ("weight", "bias")
            module.load_state_dict({k: tensors[f"{source}.{k}"] for k in kinds})
        self.head_bias.data.copy_(reader["cls.predictions.bias"])

    def embed(self, ids, segments):
        """Returns embeddings [batch, projection]."""
        pooled = torch.tanh(self.tower.pooler(self.tower(ids, segments)[:, 0]))
        return self.projection_norm(self.projection(pooled))

    def forward(self, x):
        """Returns the loss: each masked wordpiece is marginalised by itself."""
        batch, candidates, _ = x["document_ids"].shape
        documents = self.embed(
            x["document_ids"].flatten(0, 1), x["document_segment_ids"].flatten(0, 1)
        ).view(batch, candidates, -1)
        queries = self.embed(x["query_ids"], torch.zeros_like(x["query_ids"]))
        log_retrieval = torch.einsum("bd,bnd->bn", queries, documents).log_softmax(-1)
        hidden = self.reader(
            x["joined_ids"].flatten(0, 1), x["joined_segment_ids"].flatten(0, 1)
        )
        rows, columns = torch.nonzero(x["mask_weights"], as_tuple=True)
        positions = x["mask_positions"][rows, columns]
        hidden = hidden.view(batch, candidates, *hidden.shape[1:])
        masked = hidden[
            rows[:, None],
            torch.arange(candidates, device=rows.device),
            positions[:, None],
        ]
        masked = self.head_norm(functional.gelu(self.head(masked), approximate="tanh"))
        logits = functional.linear(
            masked, self.reader.tokens.weight, self.head_bias
        ).float()
        targets = x["mask_ids"][rows, columns][:, None].expand(-1, candidates)
        log_tokens = -functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        ).view(-1, candidates)
        return -torch.logsumexp(log_retrieval[rows].float() + log_tokens, -1).mean()


def _load(model, tensors, unset):
    """Loads weights, of which only those that begin with `unset` may be missing."""
    state = {
        f"realm.{name.removeprefix('bert.')}"
        if name.startswith("bert.")
        else name: data
        for name, data in tensors.items()
    }
    lacking, unknown = model.load_state_dict(state, strict=False)
    lacking = [name for name in lacking if not name.startswith(unset)]
    if lacking or unknown:
        raise ValueError(f"weights are missing, {lacking}, or unknown, {unknown}")


class Transformers(nn.Module):
    """The update of `transformers`, from its own models."""

    def __init__(self, shape, retriever, reader, attention_dropout):
        super().__init__()
        from transformers import RealmConfig, RealmKnowledgeAugEncoder, RealmScorer

        config = RealmConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["hidden"],
            retriever_proj_size=shape["projection"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_candidates=shape["candidates"],
            intermediate_size=shape["mlp"],
            hidden_act="gelu_new",
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=attention_dropout,
        )
        self.scorer, self.encoder = (
            RealmScorer(config),
            RealmKnowledgeAugEncoder(config),
        )
        # Of its embedder the head for masked words is not used; the encoder's output
        # matrix is tied to its word embeddings.
        _load(self.scorer.embedder, retriever, "cls.predictions.")
        _load(self.encoder, reader, "cls.predictions.decoder.")
        self.encoder.tie_weights()

    def forward(self, x):
        """Returns the loss."""
        scores = self.scorer(
            input_ids=x["query_ids"],
            attention_mask=(x["query_ids"] != 0).long(),
            candidate_input_ids=x["document_ids"],
            candidate_attention_mask=(x["document_ids"] != 0).long(),
            candidate_token_type_ids=x["document_segment_ids"],
        ).relevance_score
        return self.encoder(
            input_ids=x["joined_ids"],
            attention_mask=(x["joined_ids"] != 0).long(),
            token_type_ids=x["joined_segment_ids"],
            relevance_score=scores,
            labels=x["labels"],
            mlm_mask=x["mlm_mask"],
        ).loss


def read_inputs(path):
    """Returns the tensors of a batch, padded no further than its longest sequence."""
    arrays = {
        name: torch.from_numpy(array.astype(np.int64))
        for name, array in np.load(path).items()
    }
    for kind in ("document", "joined"):
        ids = arrays[f"{kind}_ids"]
        longest = int((ids != 0).sum(-1).max())
        for name in (f"{kind}_ids", f"{kind}_segment_ids"):
            arrays[name] = arrays[name][..., :longest].contiguous()
    longest = int((arrays["query_ids"] != 0).sum(-1).max())
    arrays["query_ids"] = arrays["query_ids"][:, :longest].contiguous()
    labels = torch.zeros_like(arrays["joined_ids"][:, 0])
    mask = torch.zeros_like(labels)
    rows, columns = torch.nonzero(arrays["mask_weights"], as_tuple=True)
    places = rows, arrays["mask_positions"][rows, columns]
    labels[places], mask[places] = arrays["mask_ids"][rows, columns], 1
    return arrays | {"labels": labels, "mlm_mask": mask}


def main():
    """Runs one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=("transformers", "tuned"))
    parser.add_argument("case", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention_dropout", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    shape = json.loads((flags.case / "shape.json").read_text())
    weights = [
        safetensors.torch.load_file(flags.case / f"{name}.safetensors")
        for name in ("retriever", "reader")
    ]
    if flags.peer == "tuned":
        model = Tuned(shape, *weights)
    else:
        model = Transformers(shape, *weights, flags.attention_dropout)
    model = model.to(flags.device)
    given = read_inputs(flags.case / "inputs.npz")
    inputs = {name: array.to(flags.device) for name, array in given.items()}
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-5, weight_decay=0.01, fused=flags.peer == "tuned"
    )

    def cast():
        if flags.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(flags.device, torch.bfloat16)

    with torch.no_grad(), cast():
        loss = float(model.eval()(inputs))
    model.train()
    seconds = []
    for _ in range(flags.steps + 1):  # The first one warms up.
        began = time.perf_counter()
        with cast():
            of_step = model(inputs)
        of_step.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert math.isfinite(float(of_step.detach()))
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"loss": loss, "seconds": seconds[1:], "peak_gib": peak}))


if __name__ == "__main__":
    main()
