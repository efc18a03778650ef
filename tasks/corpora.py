"""Registers a corpus with SeqIO: one call, six tasks.

    tasks.corpora.register("vital", source="runs/vital/corpus")

for a corpus that `realm prepare` has made, or

    tasks.corpora.register(
        "mine", source="articles.jsonl", corpus="runs/mine/corpus", tagger="spacy"
    )

for documents, whose blocks are then made by the first call. It registers `vital_blocks`
(the documents), `vital_ict` (sentences and their blocks), `vital_salient` (sentences
with a masked salient span), `vital_terms` (with a masked term), `vital_random_tokens`
and `vital_random_spans` (with random masks, for comparison), each with the splits train
and validation. Importing this module imports TensorFlow.
"""

import os
from typing import Any

from realm_jax.data import inverse_cloze
from realm_jax.data.blocks import BlockStore
from realm_jax.data.salient_spans import Tagger
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare.blocks import BlocksConfig, prepare_blocks, tagger_by_name
from realm_jax.prepare.corpus_tasks import require_vocabulary
from realm_jax.prepare.seqio_tasks import register_corpus
from realm_jax.prepare.vocabularies import VocabularyTraining


def register(
    name: str,
    source: str | os.PathLike[str],
    *,
    corpus: str | os.PathLike[str] | None = None,
    tagger: str | Tagger | None = None,
    vocabulary: str | os.PathLike[str] | WordPiece | None = None,
    knowledge: str | os.PathLike[str] | None = None,
    document_length: int = inverse_cloze.DOCUMENT_LENGTH,
    **settings: Any,
) -> list[str]:
    """Registers the tasks of a corpus, such as `<name>_blocks`; returns their names.

    Args:
      name: letters, digits and underscores.
      source: directory of a corpus from `realm prepare`; or, with `corpus`, documents,
        see `documents.open.open_source`.
      corpus: None if `source` is prepared. Otherwise the directory for the blocks of
        its documents. The first call makes them on all cores, which takes as long as
        `realm prepare` takes for them; later calls open them.
      tagger: None masks the spans stored with the corpus. Otherwise the salient task
        has those that this tagger finds in the blocks, whatever is stored: it runs
        when examples are made, shard by shard, and the corpus is not changed. A name
        (see `prepare.blocks`) or an object; its model is loaded here. With `corpus`,
        the name of the tagger of the documents, None for "auto".
      vocabulary: the vocabulary that the corpus must have been prepared with, a
        `vocab.txt` or a tokenizer; None accepts any. Blocks are stored as wordpieces:
        for another vocabulary prepare the corpus again. With `corpus`, the vocabulary
        to make it with, None to train one on the text.
      knowledge: the prepared corpus that is searched for these sentences, if it is
        another one (X and Z in REALM, section 4.3). Then only the tasks of masked
        sentences are registered, which refer to no block of their own.
      document_length: length of a document in wordpieces, special ones included.
      **settings: the other lengths, shards, validation split and seed, see
        `realm_jax.prepare.corpus_tasks.corpus_tasks`.
    """
    if corpus is None:
        store = BlockStore.open(source)
        if vocabulary is not None:
            if not isinstance(vocabulary, WordPiece):
                rules = store.vocabulary.settings
                vocabulary = load_vocabulary(vocabulary, **rules)
            require_vocabulary(store, vocabulary)
        if isinstance(tagger, str):
            tagger = tagger_by_name(tagger)
    else:
        store = _prepared(source, corpus, tagger, vocabulary, document_length)
        tagger = None
    return register_corpus(
        name,
        store,
        tagger=tagger,
        knowledge=None if knowledge is None else BlockStore.open(knowledge),
        document_length=document_length,
        **settings,
    )


def _prepared(
    source: str | os.PathLike[str],
    corpus: str | os.PathLike[str],
    tagger: str | Tagger | None,
    vocabulary: str | os.PathLike[str] | WordPiece | None,
    document_length: int,
) -> BlockStore:
    """Makes blocks of documents, or opens those that were made before."""
    if not isinstance(tagger, str | None):
        raise BadInputError(
            f"expected the name of a tagger for documents, got an object "
            f"({tagger.name}): processes that tag load it for themselves."
        )
    if vocabulary is not None and not isinstance(vocabulary, WordPiece):
        vocabulary = load_vocabulary(vocabulary)
    config = BlocksConfig(
        corpus=os.fspath(corpus),
        source=os.fspath(source),
        vocabulary=vocabulary or VocabularyTraining(),
        tagger=tagger or "auto",
        chunk_length=document_length,
    )
    return prepare_blocks(config)
