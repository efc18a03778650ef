"""Writes the models of a run as `transformers` has them: REALM's, or a plain BERT.

    embedder/ or scorer/   the retriever, of one tower or of two
    encoder/               the reader before fine-tuning
    openqa/                a fine-tuned model; embedder/ has embedded its documents

or, as BERT, the reader alone, with its masked-LM head if it has one.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from realm_jax import __version__
from realm_jax.data.block_records import RECORDS_FILE
from realm_jax.data.blocks import BlockStore
from realm_jax.data.store_files import new_folder, require_free
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.evaluation.loading import FinishedRun, open_finished
from realm_jax.evaluation.recorded import (
    SEARCHED,
    Overrides,
    answering_config,
    find_corpus,
    find_model,
    models_of,
    require_fine_tuned,
)
from realm_jax.index.embedding_cache import index_series
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.models.retriever import DOCUMENT_TOWER, QUERY_TOWER, RetrieverConfig
from realm_jax.stages import FINETUNE
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import Which, best_step
from realm_jax.training.finetune import AnsweringConfig
from realm_jax.training.recorded import RecordedRun
from realm_jax.training.stage_config import require_one_of
from realm_jax.weights import bert
from realm_jax.weights.realm import SHARED_TOWER, Reading
from realm_jax.weights.realm_export import require_realm, save_realm, save_tokenizer

_CARD = """\
---
library_name: transformers
tags:
- {tag}
---

# {name}

Written by realm_jax {version} from `realm {stage}`, step {step}: {facts}.

```python
from transformers import {name}

model = {name}.from_pretrained("DIR")
```
"""


def export_transformers(
    run: str,
    output: str,
    given: Overrides,
    form: str,
    *,
    checkpoint: str = "last",
    embeddings: bool = False,
) -> list[str]:
    """Writes the models of a run, as "realm" or "bert", into a folder, new or empty.

    The local folder appears whole. `given` is what the run does not say, such as where
    the corpus is, whose vocabulary is used. `checkpoint` is "last" or "best" of a run
    that is not fine-tuned. With `embeddings` a RealmForOpenQA has its blocks and their
    embeddings, too; all of them are then in memory. Returns the folders of the models,
    relative to `output`.
    """
    target = Path(output).expanduser().absolute()
    require_free(target)
    require_one_of("CHECKPOINT", checkpoint, Which)
    recorded = find_model(run, SEARCHED)
    require_fine_tuned(recorded, given)
    which = Which(checkpoint)
    if recorded.trained.stage == FINETUNE.name:
        is_measured = best_step(recorded.checkpoints) is not None
        which = Which.BEST if is_measured else Which.LAST
    finished = open_finished(recorded, recorded.trained.stage, {}, which)
    vocabulary = _vocabulary(recorded, given)
    config = models_of(recorded).retriever_config(vocabulary.size)
    with new_folder(target, "the models") as folder:
        if form == "bert":
            return [_save_bert(folder, finished, config, vocabulary)]
        require_realm(config, finished.model_dir)
        blocks = _blocks(recorded, given) if embeddings else None
        answering = None
        if recorded.trained.stage == FINETUNE.name:
            answering = answering_config(recorded, given)
        return _save_realm(folder, finished, answering, config, vocabulary, blocks)


class _Blocks(NamedTuple):
    """Texts of the blocks, and the index of them."""

    texts: np.ndarray
    embeddings: np.ndarray


def _blocks(run: RecordedRun, given: Overrides) -> _Blocks:
    place, _ = find_corpus(run, given.corpus)
    corpus = BlockStore.open(place)
    series = index_series(open_store(run.model_dir), corpus.fingerprint)
    manifest = series.latest()
    if run.trained.stage != FINETUNE.name or manifest is None:
        raise BadInputError(
            f"expected a fine-tuned model with its index in {run.model_dir}, got "
            "another one; leave out --embeddings, or export for sentence-transformers"
        )
    ids = range(corpus.num_blocks)
    texts = [text.body.encode() for text in corpus.texts(ids)]
    rows = series.read_array(manifest, EMBEDDINGS)
    return _Blocks(np.array(texts, dtype=object), rows)


def _vocabulary(run: RecordedRun, given: Overrides) -> WordPiece:
    """Returns the vocabulary in the directory of an imported model, or the corpus's."""
    store = open_store(run.model_dir)
    if "://" not in run.model_dir and store.exists("vocab.txt"):
        return load_vocabulary(Path(run.model_dir) / "vocab.txt")
    place, _ = find_corpus(
        run, given.corpus, allow_mismatch=given.allow_corpus_mismatch
    )
    return BlockStore.open(place).vocabulary


def _save_realm(
    folder: Path,
    run: FinishedRun,
    answering: AnsweringConfig | None,
    config: RetrieverConfig,
    vocabulary: WordPiece,
    blocks: _Blocks | None,
) -> list[str]:
    towers, reader = run.tree.get("retriever"), run.tree.get("reader")
    saved = []

    def save(place, name, parts, kind=config, reading=None, blocks=None):
        inner = folder / place
        inner.mkdir()
        rows = None if blocks is None else blocks.embeddings
        save_realm(
            inner,
            name,
            parts,
            kind,
            vocabulary,
            reading=reading,
            block_embeddings=rows,
        )
        if blocks is not None:
            # As RealmRetriever reads them.
            np.save(inner / RECORDS_FILE, blocks.texts, allow_pickle=True)
        (inner / "README.md").write_text(_card(run, name, "realm", config))
        saved.append(place)

    if answering is not None:
        reading = Reading(
            max_span=answering.max_span,
            layer_norm_epsilon=answering.span_layer_norm_epsilon,
            num_read=answering.num_read,
            length=run.trained.lengths["joined"],
        )
        if towers is None:
            save("reader", "RealmReader", {"reader": reader}, reading=reading)
            return saved
        queries = towers[SHARED_TOWER if config.shared else QUERY_TOWER]
        parts = {SHARED_TOWER: queries, "reader": reader}
        # The weight of f(x, z), which has no setting there, is folded into the queries.
        weighted = config.temperature / answering.retrieval_weight**2
        of_queries = dataclasses.replace(config, temperature=weighted)
        save("openqa", "RealmForOpenQA", parts, of_queries, reading, blocks)
        if not config.shared:
            save("embedder", "RealmEmbedder", {SHARED_TOWER: towers[DOCUMENT_TOWER]})
        return saved
    if towers is not None:
        kind = ("embedder", "RealmEmbedder")
        save(*(kind if config.shared else ("scorer", "RealmScorer")), towers)
    if reader is not None:
        _require_head(run)
        save("encoder", "RealmKnowledgeAugEncoder", {"encoder": reader})
    return saved


def _save_bert(
    folder: Path, run: FinishedRun, config: RetrieverConfig, vocabulary: WordPiece
) -> str:
    reader = run.tree.get("reader")
    if reader is None:
        raise BadInputError(
            f"expected a reader in {run.model_dir}, got a retriever alone; export that "
            "for sentence-transformers"
        )
    path = folder / "model.safetensors"
    name = "BertForMaskedLM" if "head_dense" in reader else "BertModel"
    if name == "BertModel":
        bert.save_bert(path, reader["bert"], config.bert)
    else:
        bert.save_masked_lm(path, reader, config.bert)
    bert.save_config(folder, config.bert, name)
    save_tokenizer(folder, vocabulary, "BertTokenizer")
    (folder / "README.md").write_text(_card(run, name, "bert", config))
    return "."


def _require_head(run: FinishedRun) -> None:
    if "head_dense" not in run.tree["reader"]:
        raise BadInputError(
            f"expected a masked-LM head in {run.model_dir}, got an encoder without "
            "one; export it as --format=bert"
        )


def _card(run: FinishedRun, name: str, tag: str, config: RetrieverConfig) -> str:
    """Returns the model card as Markdown."""
    size = config.bert
    facts = [
        f"{size.num_layers} layers of {size.hidden_size}",
        f"{size.vocab_size:,} wordpieces",
        f"GELU {'by tanh' if size.activation == 'gelu_tanh' else 'exact'}",
        f"epsilon of LayerNorm {size.layer_norm_epsilon:g}",
    ]
    if tag == "realm":
        facts.append(f"embeddings of {config.projection_size}")
    if run.trained.corpus_fingerprint:
        facts.append(f"corpus `{run.trained.corpus_fingerprint}`")
    if run.trained.source:
        facts.append(f"began with `{run.trained.source}`")
    return _CARD.format(
        tag=tag,
        name=name,
        version=__version__,
        stage=run.trained.stage.replace("_", "-"),
        step=run.step,
        facts="; ".join(facts),
    )
