import itertools
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import seqio

from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import Document, is_held_out
from realm_jax.data.inverse_cloze import inverse_cloze_examples
from realm_jax.data.masking import salient_examples
from realm_jax.data.random_masking import draw_spans, draw_tokens
from realm_jax.data.salient_spans import PreAnnotated, RuleTagger, Span
from realm_jax.data.wordpiece import WordPiece
from realm_jax.prepare import seqio_tasks
from realm_jax.prepare.materialise import materialise
from tasks import corpora
from tests import tiny_run
from tests.corpus_builder import build_corpus
from tests.data.random_masks import random_examples
from tests.json_lines import write_lines
from tests.refused import refused
from tests.seqio_fixtures import write_cache

pytestmark = pytest.mark.usefixtures("towns")

LENGTHS = {"query_length": 32, "document_length": 40, "max_masks": 6}


def load(name, split="train", **options):
    dataset = seqio.get_mixture_or_task(name).get_dataset(
        split=split, **({"shuffle": False, "num_epochs": 1} | options)
    )
    return list(dataset.as_numpy_iterator())


def fingerprints(examples):
    """Each example as bytes, for comparing sets."""
    return [
        b"".join(np.asarray(example[name]).tobytes() for name in sorted(example))
        for example in examples
    ]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_tasks_hold_what_the_plain_functions_make(store, towns, split):
    is_in_split = [
        is_held_out(text.source_id, 0.2) == (split == "validation")
        for text in store.texts(range(store.num_blocks))
    ]
    blocks = np.flatnonzero(is_in_split)
    ids, segments = store.document_ids(blocks, 40)
    masks = {"query_length": 32, "max_masks": 6}
    pairs = {"query_length": 32, "document_length": 40}
    whole = {"document_ids": ids, "document_segment_ids": segments}
    expected = {
        "towns_blocks": {"block_id": blocks, **whole},
        "towns_ict": inverse_cloze_examples(store, blocks, **pairs),
        "towns_salient": salient_examples(store, blocks, **masks),
        "towns_random_tokens": random_examples(store, blocks, draw_tokens, **masks),
        "towns_random_spans": random_examples(store, blocks, draw_spans, **masks),
    }
    # Towns differ in names alone, so none of their words is a term.
    assert {*expected, "towns_terms"} == set(towns)
    for name, arrays in expected.items():
        assert set(seqio.get_mixture_or_task(name).splits) == {"train", "validation"}
        examples = load(name, split)
        assert len(examples) == len(next(iter(arrays.values()))) > 0
        for feature, array in arrays.items():
            found = np.stack([example[feature] for example in examples])
            np.testing.assert_array_equal(found, array)


def test_shards_are_a_partition():
    # Five shards of the source; beyond them SeqIO deals out single examples.
    for name, count in [("towns_blocks", 2), ("towns_ict", 2), ("towns_salient", 8)]:
        whole = fingerprints(load(name))
        parts = [
            fingerprints(load(name, shard_info=seqio.ShardInfo(index, count)))
            for index in range(count)
        ]
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(whole)
        assert all(parts)


def test_random_masks_follow_the_seed_of_the_registration(store):
    for name, seed in {"same": 0, "other": 1}.items():
        options = {"validation_fraction": 0.2, "seed": seed}
        corpora.register(name, store.directory, **LENGTHS, **options)
    for kind in ("random_tokens", "random_spans"):
        first, same, other = (
            fingerprints(load(f"{name}_{kind}", "validation"))
            for name in ("towns", "same", "other")
        )
        assert first == same
        assert len(set(first) & set(other)) < len(first) / 2


class TownTagger:
    """Finds "Town" wherever it stands, and what is no span of a sentence."""

    name = "town-1"

    def __init__(self):
        self.batches = []

    def tag(self, texts):
        self.batches.append(len(texts))
        return [
            [
                *(Span(*found.span(), "T") for found in re.finditer("Town", text)),
                Span(len(text) - 1, len(text) + 3, "T"),
            ]
            for text in texts
        ]


def test_a_tagger_given_at_registration_tags_anew(store):
    before = {path: path.read_bytes() for path in store.directory.iterdir()}
    tagger = TownTagger()
    corpora.register(
        "retagged", store.directory, tagger=tagger, num_shards=6, **LENGTHS
    )
    assert tagger.batches == []
    examples = load("retagged_salient", shard_info=seqio.ShardInfo(0, 6))
    # The blocks of the one shard that was asked for, and no others.
    assert 0 < sum(tagger.batches) <= np.ceil(store.num_blocks / 6)
    answers = {
        store.vocabulary.decode(example["mask_ids"]).replace(" ", "")
        for example in examples
    }
    assert len(answers) == 1
    assert "town" in answers.pop()
    assert load("retagged_ict")
    assert {path: path.read_bytes() for path in store.directory.iterdir()} == before


def test_provenance_tells_other_spans_apart(store):
    taggers = {"one": TownTagger(), "two": TownTagger(), "rules": "rules"}
    for name, tagger in (taggers | {"none": PreAnnotated()}).items():
        corpora.register(name, store.directory, tagger=tagger)
    found = {
        name: seqio_tasks.provenance(seqio.TaskRegistry.get(f"{name}_salient"))
        for name in ("towns", "one", "two", "rules", "none")
    }
    assert found["one"] == found["two"]
    assert len({entry["settings_fingerprint"] for entry in found.values()}) == 4
    corpus = {entry["corpus_fingerprint"] for entry in found.values()}
    assert corpus == {store.fingerprint}
    assert found["rules"]["tagger"] == RuleTagger.name
    # Tasks without spans are those of the corpus, whoever tags.
    pairs = seqio_tasks.provenance(seqio.TaskRegistry.get("one_ict"))
    assert pairs["settings_fingerprint"] == found["towns"]["settings_fingerprint"]


def test_the_tagger_of_the_corpus_finds_the_same_spans_again(store):
    # Whatever the number of shards.
    options = {"tagger": "rules", "num_shards": 17, "validation_fraction": 0.2}
    corpora.register("again", store.directory, **LENGTHS, **options)
    for split in ("train", "validation"):
        again = fingerprints(load("again_salient", split))
        assert again == fingerprints(load("towns_salient", split))


def test_what_cannot_be_registered_is_refused(store, tmp_path):
    path = store.directory / "vocab.txt"
    corpora.register("by_path", store.directory, vocabulary=path)
    corpora.register("by_object", store.directory, vocabulary=store.vocabulary)
    pieces = [*store.vocabulary.pieces, "new"]
    WordPiece(pieces).save(tmp_path / "vocab.txt")
    cased = WordPiece(pieces[:-1], lowercase=False)
    folder, another = store.directory, r"in the vocabulary .* got .* again"
    for name, place, options, said in [
        ("other", folder, {"vocabulary": tmp_path / "vocab.txt"}, another),
        ("other", folder, {"vocabulary": cased}, another),
        ("other", folder, {"vocabulary": tmp_path / "none"}, "cannot be read"),
        ("other", folder, {"tagger": "flair"}, "checkpoint:FOLDER, got 'flair'"),
        ("other", tmp_path, {}, "expected a prepared corpus at"),
        ("towns", folder, {}, "got 'towns_blocks'"),
        ("to wns", folder, {}, "got 'to wns_blocks'"),
    ]:
        with refused(said):
            corpora.register(name, place, **options)
    assert "other_blocks" not in seqio.TaskRegistry.names()
    corpora.register("all_train", store.directory, validation_fraction=0.0)
    with refused(r"split 'validation', got none .* of 0.0"):
        load("all_train_blocks", "validation")


def test_shuffling_follows_the_seed():
    def shuffled(seed):
        options = {"shuffle": True, "seed": seed}
        return fingerprints(load("towns_salient", "validation", **options))

    plain = fingerprints(load("towns_salient", "validation"))
    one, other = shuffled(1), shuffled(2)
    assert one == shuffled(1)
    assert one not in (other, plain)
    assert sorted(one) == sorted(other) == sorted(plain)


# All three tasks of masks have the same features.
@pytest.mark.parametrize("name", ["towns_ict", "towns_random_spans"])
def test_a_cache_holds_the_same_examples(tmp_path, monkeypatch, name):
    write_cache(seqio.TaskRegistry.get(name), tmp_path / name)
    monkeypatch.setattr(seqio.utils, "_GLOBAL_CACHE_DIRECTORIES", [str(tmp_path)])
    for split in ("train", "validation"):
        cached, made = load(name, split, use_cached=True), load(name, split)
        assert sorted(fingerprints(cached)) == sorted(fingerprints(made))
        dtypes = ({k: v.dtype for k, v in rows[0].items()} for rows in (cached, made))
        assert next(dtypes) == next(dtypes)


def test_seqio_does_not_cut_the_end_of_a_sequence_off():
    lengths = {"query_ids": 32, "document_ids": 40, "document_segment_ids": 40}
    assert load("towns_ict", sequence_length=lengths)
    with refused(r"at least 40 for document_ids.* got 30"):
        load("towns_ict", sequence_length=lengths | {"document_ids": 30})


def test_one_call_makes_a_corpus_of_documents(store, tmp_path):
    """The tasks are those of the corpus that was built another way, block by block."""
    bodies = {}
    for text in store.texts(range(store.num_blocks)):
        bodies.setdefault((text.source_id, text.title), []).append(text.body)
    articles = [
        {"id": source_id, "title": title, "text": " ".join(of_article)}
        for (source_id, title), of_article in bodies.items()
    ]
    source = write_lines(tmp_path / "towns.jsonl", articles)

    settings: dict[str, Any] = {"corpus": tmp_path / "corpus"} | LENGTHS
    settings |= {"vocabulary": store.vocabulary, "tagger": "rules"}
    settings |= {"validation_fraction": 0.2, "num_shards": 5}
    corpora.register("made", source, **settings)
    assert BlockStore.open(tmp_path / "corpus").fingerprint == store.fingerprint
    assert fingerprints(load("made_salient")) == fingerprints(load("towns_salient"))
    made = (tmp_path / "corpus" / "corpus.json").stat().st_mtime_ns
    corpora.register("opened", source, **settings)
    assert (tmp_path / "corpus" / "corpus.json").stat().st_mtime_ns == made
    with refused("expected the name of a tagger"):
        corpora.register("object", "x.jsonl", corpus=tmp_path, tagger=RuleTagger())
    assert "object_blocks" not in seqio.TaskRegistry.names()


def test_the_vocabulary_of_documents_is_used_as_the_files_beside_it_say(
    store, tmp_path
):
    """The words are lower case, which alone would say that it lowercases."""
    store.vocabulary.save(tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    source = write_lines(tmp_path / "a.jsonl", [{"title": "Town", "text": "A mill."}])
    made = {"corpus": tmp_path / "corpus", "vocabulary": tmp_path / "vocab.txt"}
    corpora.register("cased", source, tagger="rules", **made)
    assert not BlockStore.open(tmp_path / "corpus").vocabulary.lowercase


def test_sentences_of_one_corpus_over_the_blocks_of_another(store, tmp_path):
    documents = [
        Document(f"News {i}", f"Karel Dorm saw {i} mills in {1300 + i}.", f"n-{i}")
        for i in range(40)
    ]

    def build(name, vocabulary):
        return build_corpus(documents, tmp_path / name, vocabulary, chunk_length=40)

    news = build("news", store.vocabulary)
    searched = {"knowledge": store.directory, "validation_fraction": 0.2}
    names = corpora.register("news", news.directory, **searched, **LENGTHS)
    kinds = ("salient", "terms", "random_tokens", "random_spans")
    assert names == [f"news_{kind}" for kind in kinds]
    examples = materialise("news_salient", "train", tmp_path / "examples")
    assert (examples.features["source_block"] == -1).all()
    # What they are of is no part of the corpus that is searched.
    assert (tmp_path / "examples/query_ids.npy").exists()
    # A trainer on the corpus that is searched takes them for its own.
    assert examples.metadata["corpus_fingerprint"] == store.fingerprint
    settings = news.info["settings_fingerprint"]
    assert examples.metadata["settings_fingerprint"] == settings
    texts = [document.text for document in documents]
    build("other", WordPiece.train(texts, 100, tmp_path / "vocab.txt"))
    with refused("vocabulary"):
        corpora.register("other", tmp_path / "other", knowledge=store.directory)


_MODULE = """
from tasks import corpora
corpora.register(
    "stored", {directory!r}, query_length=32, inverse_cloze_query_length=32,
    document_length=40, max_masks=6, num_shards=3, validation_fraction=0.2,
)
"""


@pytest.mark.full
def test_seqios_own_tool_caches_the_tasks_of_a_corpus(store, tmp_path, monkeypatch):
    (tmp_path / "my_towns.py").write_text(
        _MODULE.format(directory=str(store.directory))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "seqio.scripts.cache_tasks_main"),
            "--module_import=my_towns",
            "--tasks=stored_salient",
            f"--output_cache_dir={tmp_path}/cache",
            "--pipeline_options=--runner=DirectRunner",
        ],
        check=False,
        cwd=tiny_run.ROOT,
        env=tiny_run.environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    __import__("my_towns")
    seqio.add_global_cache_dirs([str(tmp_path / "cache")])
    made = {
        cached: materialise(
            "stored_salient", "train", tmp_path / str(cached), use_cached=cached
        )
        for cached in (False, True)
    }
    # The tool shuffles what it writes.
    without, cached = (
        sorted(
            fingerprints(
                {name: array[row] for name, array in examples.features.items()}
                for row in range(len(examples))
            )
        )
        for examples in made.values()
    )
    assert cached == without != []
