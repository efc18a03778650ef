"""Compares imported models with what `transformers` computes of them.

    .cache/peers/bin/python bench/peers/realm_models.py DIR --size=base
    python -m bench.weights_parity DIR

Prints the greatest difference of each output, in float32. The tests do the same with
tiny models.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import realm_jax
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.masked_lm import Marginalization, marginal_likelihood
from realm_jax.objectives.open_qa import (
    AnswerMarginalization,
    open_qa,
    span_log_probs,
)
from realm_jax.training.imported import ImportConfig, import_weights
from realm_jax.weights.published import PublishedModel, read_published
from realm_jax.weights.realm import READER

Arrays = Mapping[str, np.ndarray]


def differences(folder: pathlib.Path) -> dict[str, float]:
    """Returns the greatest difference of each output of a model, by its name.

    The folder is one of those that `bench/peers/realm_models.py` writes, but for
    openqa.
    """
    model = read_published(str(folder))
    expected = np.load(folder / "expected.npz")
    found = _COMPUTE[folder.name](model, expected)
    return {
        name: float(np.abs(np.asarray(value) - expected[name]).max())
        for name, value in found.items()
    }


def answers(folder: pathlib.Path, work: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the answers of `transformers`, and those of the imported model.

    `folder` is the RealmForOpenQA that `bench/peers/realm_models.py` writes, and `work`
    a new one for the model and its corpus.
    """
    expected = json.loads((folder / "answers.json").read_text())
    corpus = str(work / "corpus")
    import_weights(ImportConfig([str(folder)], str(work / "finetune"), corpus))
    model = realm_jax.load(work / "finetune")
    found = [answer.text for answer in model.answer(list(expected))]
    return list(expected.values()), found


def _embedder(model: PublishedModel, given: Arrays) -> dict[str, jax.typing.ArrayLike]:
    retriever = Retriever(model.retriever)
    embed = _applied(retriever, model.towers, retriever.embed_documents)
    return {"embeddings": embed(given["ids"], given["segments"])}


def _scorer(model: PublishedModel, given: Arrays) -> dict[str, jax.typing.ArrayLike]:
    config = dataclasses.replace(model.retriever, shared=False)
    retriever = Retriever(config)
    embed_queries = _applied(retriever, model.towers, retriever.embed_queries)
    embed_documents = _applied(retriever, model.towers, retriever.embed_documents)
    queries = embed_queries(given["query_ids"])
    documents = embed_documents(given["ids"], given["segments"])
    return {"scores": jnp.einsum("bp,bcp->bc", queries, documents)}


def _encoder(model: PublishedModel, given: Arrays) -> dict[str, jax.typing.ArrayLike]:
    encoder = KnowledgeEncoder(model.bert)
    inputs = given["ids"], given["segments"], given["mask_positions"][:, None]
    logits = _applied(encoder, model.reader)(*inputs)
    targets = given["mask_ids"][:, None, :, None]
    log_tokens = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, -1)[..., 0]
    likelihood = marginal_likelihood(
        jax.nn.log_softmax(given["relevance"]),
        log_tokens,
        jnp.ones(given["mask_ids"].shape),
        Marginalization.PER_TOKEN,
    )
    return {
        "logits": logits[..., : given["logits"].shape[-1]],
        "loss": likelihood.loss_total / likelihood.loss_count,
    }


def _reader(model: PublishedModel, given: Arrays) -> dict[str, jax.typing.ArrayLike]:
    """Computes the score of every span, and the losses of one question's blocks."""
    assert model.reading is not None
    max_span = model.reading.max_span
    reader = SpanReader(model.bert, max_span, model.reading.layer_norm_epsilon)
    scores = _applied(reader, model.reader)(given["ids"], given["segments"])
    widths = given["ends"] - given["starts"]
    order = given["starts"] * max_span + widths
    answers = np.zeros(scores.logits.shape, bool)
    rows = np.flatnonzero(given["has_answer"])
    answers[rows, given["answer_starts"][rows] * max_span + 1] = True
    relevance = jnp.asarray(given["relevance"])[None]
    log_spans = span_log_probs(
        relevance,
        scores.logits[None],
        scores.valid[None],
        AnswerMarginalization.JOINT_SOFTMAX,
    )
    losses = open_qa(
        relevance,
        jnp.asarray(given["has_answer"])[None],
        log_spans,
        jnp.asarray(answers)[None],
    )
    valid = scores.valid[:, order]
    # The difference is by how much their best span exceeds ours, in their scores: of
    # equal ones either may be the best.
    best = int(log_spans[0][:, order].argmax())
    theirs = given["logits"] + given["relevance"][:, None]
    block, start, end = given["best"]
    chosen = (given["starts"] == start) & (given["ends"] == end)
    return {
        "logits": jnp.where(valid, scores.logits[:, order], given["logits"]),
        "best": given["best"] + theirs[block, chosen] - theirs.ravel()[best],
        "losses": jnp.stack([losses.retriever_total, losses.reader_total]),
    }


_COMPUTE: Mapping[
    str, Callable[[PublishedModel, Arrays], dict[str, jax.typing.ArrayLike]]
] = {
    "embedder": _embedder,
    "scorer": _scorer,
    "encoder": _encoder,
    READER: _reader,
}


def _applied(module: nn.Module, params, method=None):
    """Returns the module as a function of its inputs, compiled."""
    apply = jax.jit(
        lambda params, *inputs: module.apply({"params": params}, *inputs, method=method)
    )
    return functools.partial(apply, params)


def main() -> None:
    """Prints the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=pathlib.Path)
    flags = parser.parse_args()
    for name in _COMPUTE:
        for output, difference in differences(flags.models / name).items():
            print(f"{name}: {output} {difference:.1e}")
    with tempfile.TemporaryDirectory() as work:
        expected, found = answers(flags.models / "openqa", pathlib.Path(work))
        same = sum(map(str.__eq__, expected, found))
        print(f"openqa: {same} of {len(expected)} answers are the same")


if __name__ == "__main__":
    main()
