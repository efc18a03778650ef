"""A corpus of a few documents, made in one go: no source, no parts, no workers."""

import itertools

from realm_jax.data.block_writer import BlockWriter, document_rows
from realm_jax.data.blocks import BlockStore
from realm_jax.data.corpus import chunk_each, settings_fingerprint
from realm_jax.data.salient_spans import RuleTagger

_RULES = RuleTagger()


def build_corpus(documents, directory, vocabulary, *, chunk_length, tagger=_RULES):
    documents = list(documents)
    with BlockWriter(directory, vocabulary, chunk_length) as writer:
        made = chunk_each(documents, vocabulary, tagger, chunk_length).blocks
        for block in itertools.chain.from_iterable(made):
            writer.add(block)
        writer.add_documents(document_rows(documents, list(map(len, made))))
        writer.metadata |= {
            "num_documents": len(documents),
            "tagger": tagger.name,
            "source": "",
            "settings_fingerprint": settings_fingerprint(
                vocabulary=vocabulary,
                tagger_name=tagger.name,
                chunk_length=chunk_length,
                source="",
            ),
        }
    return BlockStore.open(directory)
