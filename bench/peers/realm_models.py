"""Writes random models of the REALM family of `transformers`, and what they compute.

    make peers
    .cache/peers/bin/python bench/peers/realm_models.py \\
      tests/weights/realm_models.tar.xz
    .cache/peers/bin/python bench/peers/realm_models.py DIR --size=base

Each model is in a folder of its own, as `save_pretrained` leaves it, with inputs and
outputs in `expected.npz`. `bench.weights_parity` imports the folders and compares; the
tests do so with the tiny ones, which are kept as an archive. Their weights are
multiples of 1/32, which makes it small, and all words are one wordpiece, so that every
span is of whole words.
"""

import argparse
import json
import pathlib
import tarfile
import tempfile

import numpy as np
import torch
import transformers

WORDS = (
    *("the", "river", "town", "mill", "is", "near", "who", "was", "built", "in", "old"),
    *("new", "stone", "bridge", "from", "year", "king", "queen", "east", "west"),
    *("north", "south", "bank", "where", "when", "he", "she", "a", "of", "and"),
)
SIZES = {
    "tiny": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 48,
        "retriever_proj_size": 8,
        "reader_seq_len": 32,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "reader_layer_norm_eps": 2e-3,
        "max_span_width": 6,
    },
    "base": {"vocab_size": 30522},
}
BATCH, CANDIDATES, READ, BLOCKS = 2, 3, 4, 12


def main() -> None:
    """Writes the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    flags = parser.parse_args()
    if flags.output.suffix != ".xz":
        write(flags.output, flags.size)
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        write(root, flags.size)
        archive(root, flags.output)


def write(root: pathlib.Path, size: str) -> None:
    """Writes a folder for each model."""
    torch.manual_seed(0)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    settings = {
        "vocab_size": len(pieces),
        "num_candidates": CANDIDATES,
        "reader_beam_size": READ,
        "searcher_beam_size": BLOCKS,
        "num_block_records": BLOCKS,
        **SIZES[size],
    }
    pieces += [f"[unused{i}]" for i in range(settings["vocab_size"] - len(pieces))]
    config = transformers.RealmConfig(**settings)
    root.mkdir(parents=True, exist_ok=True)
    vocabulary = root / "vocab.txt"
    vocabulary.write_text("".join(f"{piece}\n" for piece in pieces))
    tokenizer = transformers.RealmTokenizer(str(vocabulary))
    rng = np.random.default_rng(0)
    longest = min(64, config.max_position_embeddings)
    with torch.no_grad():
        for make in (embedder, scorer, encoder, reader, openqa):
            folder = root / make.__name__
            model, expected = make(config, tokenizer, rng, longest, folder)
            tokenizer.save_pretrained(folder)
            # A tensor that two modules share is written twice, or not at all.
            model.save_pretrained(
                folder, safe_serialization=make in (embedder, encoder)
            )
            arrays = {name: np.asarray(value) for name, value in expected.items()}
            np.savez(folder / "expected.npz", **arrays)
    if size == "tiny":
        torch_files(root / "torch_files")


def torch_files(folder: pathlib.Path) -> None:
    """Writes tensors of several kinds in both formats of `torch.save`."""
    folder.mkdir()
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "whole": whole,
        "transposed": whole.T,
        "part": whole[1:3],
        "columns": whole[:, 2:4],
        "half": whole.half(),
        "bfloat16": whole.bfloat16(),
        "whole_numbers": torch.arange(5),
        "parameter": torch.nn.Parameter(whole[0] / 3),
        "empty": torch.zeros(0, 3),
        "single": torch.tensor(2.5),
    }
    for name, is_new in (("new", True), ("old", False)):
        torch.save(
            tensors, folder / f"{name}.bin", _use_new_zipfile_serialization=is_new
        )
    arrays = {name: tensor.detach().float().numpy() for name, tensor in tensors.items()}
    np.savez(folder / "expected.npz", **arrays)


def random_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Draws all parameters, biases and scales too."""
    for name, value in model.named_parameters():
        # Large ones where layers are few, so that outputs depend on inputs; through
        # twelve such layers all positions would become alike.
        is_small = model.config.num_hidden_layers < 3
        spread = 2.0 if is_small else 0.5
        scale = 0.1 if value.ndim == 1 else spread * value.shape[-1] ** -0.5
        drawn = scale * torch.randn(value.shape)
        value.copy_(torch.round(32 * drawn) / 32 if is_small else drawn)
        if name.endswith("LayerNorm.weight") or "layer_normalization.weight" in name:
            value += 1
    return model.eval()


def rows(rng: np.random.Generator, shape: tuple[int, ...], longest: int, size: int):
    """Draws ids and segments, padded at the end."""
    ids = rng.integers(5, size, (*shape, longest))
    lengths = rng.integers(longest // 2, longest + 1, (*shape, 1))
    column = np.arange(longest)
    ids[..., 0] = 2
    ids = np.where(column < lengths, ids, 0)
    segments = (column >= longest // 3) & (ids != 0)
    return ids, segments.astype(np.int64)


def given(ids: np.ndarray, segments: np.ndarray, prefix: str = "") -> dict:
    """Returns the arguments of a model."""
    return {
        f"{prefix}input_ids": torch.from_numpy(ids),
        f"{prefix}attention_mask": torch.from_numpy((ids != 0).astype(np.int64)),
        f"{prefix}token_type_ids": torch.from_numpy(segments),
    }


def embedder(config, tokenizer, rng, longest, folder):
    """RealmEmbedder."""
    model = random_weights(transformers.RealmEmbedder(config))
    ids, segments = rows(rng, (BATCH,), longest, len(WORDS) + 5)
    found = model(**given(ids, segments)).projected_score
    return model, {"ids": ids, "segments": segments, "embeddings": found}


def scorer(config, tokenizer, rng, longest, folder):
    """RealmScorer, with an embedder of its own for queries."""
    other = random_weights(transformers.RealmEmbedder(config))
    model = random_weights(transformers.RealmScorer(config, query_embedder=other))
    queries, none = rows(rng, (BATCH,), longest // 2, len(WORDS) + 5)
    ids, segments = rows(rng, (BATCH, CANDIDATES), longest, len(WORDS) + 5)
    found = model(
        **given(queries, none * 0), **given(ids, segments, "candidate_")
    ).relevance_score
    return model, {
        "query_ids": queries,
        "ids": ids,
        "segments": segments,
        "scores": found,
    }


def encoder(config, tokenizer, rng, longest, folder):
    """RealmKnowledgeAugEncoder: logits of some positions, and the marginal loss."""
    model = random_weights(transformers.RealmKnowledgeAugEncoder(config))
    model.tie_weights()
    ids, segments = rows(rng, (BATCH, CANDIDATES), longest, len(WORDS) + 5)
    masks = np.stack([np.sort(rng.choice(longest // 2 - 1, 3, False)) for _ in ids]) + 1
    targets = rng.integers(5, len(WORDS) + 5, masks.shape)
    scores = rng.normal(size=(BATCH, CANDIDATES)).astype(np.float32)
    labels, mlm_mask = np.zeros((2, BATCH, longest), np.int64)
    for row in range(BATCH):
        labels[row, masks[row]], mlm_mask[row, masks[row]] = targets[row], 1
    found = model(
        **given(ids, segments),
        relevance_score=torch.from_numpy(scores),
        labels=torch.from_numpy(labels),
        mlm_mask=torch.from_numpy(mlm_mask),
    )
    logits = found.logits.reshape(BATCH, CANDIDATES, longest, -1)
    logits = np.take_along_axis(logits.numpy(), masks[:, None, :, None], axis=2)
    return model, {
        "ids": ids,
        "segments": segments,
        "mask_positions": masks,
        "mask_ids": targets,
        "relevance": scores,
        "logits": logits[..., : len(WORDS) + 5],
        "loss": found.loss,
    }


def reader(config, tokenizer, rng, longest, folder):
    """RealmReader: the best span, the score of every span, and both losses."""
    model = random_weights(transformers.RealmReader(config))
    longest = min(longest, config.reader_seq_len)
    ids, segments = rows(rng, (READ,), longest, len(WORDS) + 5)
    # The last wordpiece is [SEP], which is no part of the body.
    body = segments * (np.arange(longest) < (ids != 0).sum(-1, keepdims=True) - 1)
    scores = torch.from_numpy(rng.normal(size=READ).astype(np.float32))
    begin = (body.argmax(-1) + np.array([0, 1, 2, 0]))[:, None]
    seen = []
    hook = model.qa_outputs.register_forward_hook(lambda *parts: seen.append(parts[2]))
    has_answer = np.array([True, True, False, True])
    found = model(
        **given(ids, segments),
        relevance_score=scores.clone(),
        block_mask=torch.from_numpy(body.astype(bool)),
        start_positions=torch.from_numpy(np.where(has_answer[:, None], begin, -1)),
        end_positions=torch.from_numpy(np.where(has_answer[:, None], begin + 1, -1)),
        has_answers=torch.from_numpy(has_answer),
    )
    hook.remove()
    logits, starts, ends = seen[0]
    return model, {
        "ids": ids,
        "segments": segments,
        "relevance": scores,
        # The model has added the scores in place.
        "logits": logits - scores[:, None],
        "starts": starts,
        "ends": ends,
        "best": [int(found.block_idx), int(found.start_pos), int(found.end_pos)],
        "answer_starts": begin[:, 0],
        "has_answer": has_answer,
        "losses": [float(found.retriever_loss), float(found.reader_loss)],
    }


def openqa(config, tokenizer, rng, longest, folder):
    """RealmForOpenQA with its blocks, from a question to an answer."""

    def sentence(count: int) -> str:
        return " ".join(rng.choice(WORDS, count))

    texts = [sentence(rng.integers(9, 20)).encode() for _ in range(BLOCKS)]
    blocks = np.array(texts, dtype=object)
    retriever = transformers.RealmRetriever(blocks, tokenizer)
    model = transformers.RealmForOpenQA(config, retriever)
    random_weights(model)
    model.block_emb.copy_(torch.randn(model.block_emb.shape))
    folder.mkdir()
    retriever.save_pretrained(folder)
    answers, questions = [], [sentence(6) for _ in range(16)]
    if config.num_hidden_layers > 2:
        # Questions are embedded almost alike, so that all would find the same blocks.
        inputs = tokenizer(questions[:BLOCKS], padding=True, return_tensors="pt")
        embedded = model.embedder(**inputs).projected_score
        apart = embedded - embedded.mean(0)
        model.block_emb.copy_(10 * apart / apart.norm(dim=-1, keepdim=True))
    for question in questions:
        found = model(**tokenizer([question], return_tensors="pt"))
        answers.append(tokenizer.decode(found.predicted_answer_ids))
    assert len(set(answers)) > 3, answers
    (folder / "answers.json").write_text(
        json.dumps(dict(zip(questions, answers, strict=True)))
    )
    return model, {"block_embeddings": model.block_emb}


def archive(root: pathlib.Path, output: pathlib.Path) -> None:
    """Packs the folders, files that are alike beside each other."""
    files = [file for file in root.rglob("*") if file.is_file()]
    with tarfile.open(output, "w:xz", preset=9) as target:
        for file in sorted(files, key=lambda file: (file.name, file)):
            info = tarfile.TarInfo(file.relative_to(root).as_posix())
            info.size = file.stat().st_size
            with file.open("rb") as content:
                target.addfile(info, content)


if __name__ == "__main__":
    main()
