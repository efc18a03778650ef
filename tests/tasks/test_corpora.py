import itertools
import json

import numpy as np
import pytest
import seqio
import tensorflow as tf

from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import Document
from realm_jax.data.inverse_cloze import inverse_cloze_examples
from realm_jax.data.masking import salient_examples
from realm_jax.data.random_masking import random_span_examples, random_token_examples
from realm_jax.data.salient_spans import PreAnnotated, RuleTagger, Span
from realm_jax.data.splits import is_held_out
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare import seqio_tasks
from realm_jax.prepare.materialise import materialise
from tasks import corpora
from tests.corpus_builder import build_corpus

pytestmark = pytest.mark.usefixtures("towns")

NAMES = (
    "towns_blocks",
    "towns_ict",
    "towns_salient",
    "towns_random_tokens",
    "towns_random_spans",
)
BLOCK_FEATURE = {
    "towns_blocks": "block_id",
    "towns_ict": "block_ids",
    "towns_salient": "source_block",
    "towns_random_tokens": "source_block",
    "towns_random_spans": "source_block",
}


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


def blocks_of_split(store, held_out):
    return [
        block
        for block in range(store.num_blocks)
        if is_held_out(store.text(block).source_id, 0.2) == held_out
    ]


def test_registers_six_tasks(towns):
    # Towns differ in names alone, so none of their words is a term.
    assert tuple(towns) == (*NAMES[:3], "towns_terms", *NAMES[3:])
    for name in NAMES:
        assert set(seqio.get_mixture_or_task(name).splits) == {"train", "validation"}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_tasks_hold_what_the_plain_functions_make(store, split):
    blocks = np.array(blocks_of_split(store, split == "validation"))
    ids, segments = store.document_ids(blocks, 40)
    expected = {
        "towns_blocks": {
            "block_id": blocks,
            "document_ids": ids,
            "document_segment_ids": segments,
        },
        "towns_ict": inverse_cloze_examples(
            store, blocks, query_length=32, document_length=40
        ),
        "towns_salient": salient_examples(store, blocks, query_length=32, max_masks=6),
        "towns_random_tokens": random_token_examples(
            store, blocks, query_length=32, max_masks=6
        ),
        "towns_random_spans": random_span_examples(
            store, blocks, query_length=32, max_masks=6
        ),
    }
    assert expected.keys() == set(NAMES)
    for name, arrays in expected.items():
        examples = load(name, split)
        assert len(examples) == len(next(iter(arrays.values()))) > 0
        for feature, array in arrays.items():
            found = np.stack([example[feature] for example in examples])
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("name", NAMES)
def test_no_article_is_in_both_splits(store, name):
    sources = {
        split: {
            store.text(example[BLOCK_FEATURE[name]]).source_id
            for example in load(name, split)
        }
        for split in ("train", "validation")
    }
    assert sources["train"] | sources["validation"] == {f"town-{i}" for i in range(60)}
    assert not sources["train"] & sources["validation"]


@pytest.mark.parametrize(
    ("name", "num_shards"), [*((name, 2) for name in NAMES), ("towns_salient", 8)]
)
def test_shards_are_a_partition(name, num_shards):
    # Five shards of the source; beyond them SeqIO deals out single examples.
    whole = fingerprints(load(name))
    parts = [
        fingerprints(load(name, shard_info=seqio.ShardInfo(index, num_shards)))
        for index in range(num_shards)
    ]
    assert sorted(itertools.chain.from_iterable(parts)) == sorted(whole)
    assert all(parts)


@pytest.mark.parametrize("name", ["random_tokens", "random_spans"])
def test_random_masks_follow_the_seed_of_the_registration(store, name):
    options = {"query_length": 32, "document_length": 40, "max_masks": 6}
    corpora.register("same", store.directory, **options, validation_fraction=0.2)
    corpora.register(
        "other", store.directory, **options, validation_fraction=0.2, seed=1
    )
    made = [fingerprints(load(f"{task}_{name}")) for task in ("towns", "same", "other")]
    assert made[0] == made[1]
    assert len(set(made[0]) & set(made[2])) < len(made[0]) / 2


class TownTagger:
    """Finds "Town" wherever it stands, and what is no span of a sentence."""

    name = "town-1"

    def __init__(self):
        self.batches = []

    def tag(self, texts):
        self.batches.append(len(texts))
        return [
            [
                *(
                    Span(i, i + 4, "T")
                    for i in range(len(text))
                    if text[i:][:4] == "Town"
                ),
                Span(len(text) - 1, len(text) + 3, "T"),
            ]
            for text in texts
        ]


def test_a_tagger_given_at_registration_tags_anew(store):
    before = {path: path.read_bytes() for path in store.directory.iterdir()}
    tagger = TownTagger()
    corpora.register(
        "retagged",
        store.directory,
        tagger=tagger,
        query_length=32,
        document_length=40,
        num_shards=6,
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
    for name, tagger in (
        ("one", TownTagger()),
        ("two", TownTagger()),
        ("rules", "rules"),
        ("none", PreAnnotated()),
    ):
        corpora.register(name, store.directory, tagger=tagger)
    found = {
        name: seqio_tasks.provenance(seqio.TaskRegistry.get(f"{name}_salient"))
        for name in ("towns", "one", "two", "rules", "none")
    }
    assert found["one"] == found["two"]
    settings = {entry["settings_fingerprint"] for entry in found.values()}
    assert len(settings) == 4
    assert {entry["corpus_fingerprint"] for entry in found.values()} == {
        store.fingerprint
    }
    assert found["rules"]["tagger"] == RuleTagger.name
    # Tasks without spans are those of the corpus, whoever tags.
    pairs = seqio_tasks.provenance(seqio.TaskRegistry.get("one_ict"))
    assert pairs["settings_fingerprint"] == found["towns"]["settings_fingerprint"]


def test_the_tagger_of_the_corpus_finds_the_same_spans_again(store):
    corpora.register("again", store.directory, tagger="rules", query_length=32)
    corpora.register("kept", store.directory, query_length=32)
    assert fingerprints(load("again_salient")) == fingerprints(load("kept_salient"))


def test_another_vocabulary_is_refused(store, tmp_path):
    path = store.directory / "vocab.txt"
    corpora.register("by_path", store.directory, vocabulary=path)
    corpora.register("by_object", store.directory, vocabulary=store.vocabulary)
    pieces = [*store.vocabulary.pieces, "new"]
    WordPiece(pieces).save(tmp_path / "vocab.txt")
    for wanted in (tmp_path / "vocab.txt", WordPiece(pieces[:-1], lowercase=False)):
        with pytest.raises(
            BadInputError, match=r"in the vocabulary .* got .* again"
        ) as e:
            corpora.register("other", store.directory, vocabulary=wanted)
        assert "\n" not in str(e.value)
        assert str(store.directory) in str(e.value)
    with pytest.raises(BadInputError, match="cannot be read"):
        corpora.register("other", store.directory, vocabulary=tmp_path / "none")
    assert "other_blocks" not in seqio.TaskRegistry.names()


def test_an_unknown_tagger_is_refused(store):
    with pytest.raises(BadInputError, match="checkpoint:FOLDER, got 'flair'"):
        corpora.register("other", store.directory, tagger="flair")
    assert "other_blocks" not in seqio.TaskRegistry.names()


def test_shuffling_follows_the_seed():
    plain = fingerprints(load("towns_salient"))
    one, same, other = (
        fingerprints(load("towns_salient", shuffle=True, seed=seed))
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    assert one != plain
    assert sorted(one) == sorted(other) == sorted(plain)


def test_the_number_of_shards_does_not_change_the_examples(store, towns):
    whole = fingerprints(load("towns_salient", "validation"))
    corpora.register(
        "again",
        store.directory,
        query_length=32,
        document_length=40,
        max_masks=6,
        num_shards=17,
        validation_fraction=0.2,
    )
    assert fingerprints(load("again_salient", "validation")) == whole


def write_cache(task, directory):
    """Does what SeqIO's caching tool does, without Beam."""
    for split in task.splits:
        shards = task.source.list_shards(split)
        count = 0
        for index in range(len(shards)):
            info = seqio.ShardInfo(index, len(shards))
            source = task.source.get_dataset(split, shuffle=False, shard_info=info)
            dataset = task.preprocess_precache(source, seed=42)
            prefix = seqio.get_cached_tfrecord_prefix(directory, split)
            path = f"{prefix}-{index:05d}-of-{len(shards):05d}"
            with tf.io.TFRecordWriter(path) as writer:
                for example in dataset.as_numpy_iterator():
                    writer.write(seqio.dict_to_tfexample(example).SerializeToString())
                    count += 1
        features = {
            # The tool expects lengths to differ, and notes none.
            name: {
                "shape": [None, *spec.shape.as_list()[1:]] if spec.shape.rank else [],
                "dtype": spec.dtype.name,
            }
            for name, spec in dataset.element_spec.items()
        }
        info = {
            "num_shards": len(shards),
            "features": features,
            "seqio_version": seqio.__version__,
        }
        info_path = seqio.get_cached_info_path(directory, split)
        tf.io.gfile.GFile(info_path, "w").write(json.dumps(info))
        stats_path = seqio.get_cached_stats_path(directory, split)
        tf.io.gfile.GFile(stats_path, "w").write(json.dumps({"examples": count}))
    tf.io.gfile.GFile(f"{directory}/COMPLETED", "w").write("")


# All three tasks of masks have the same features.
@pytest.mark.parametrize("name", ["towns_blocks", "towns_ict", "towns_random_spans"])
def test_a_cache_holds_the_same_examples(tmp_path, monkeypatch, name):
    directory = tmp_path / name
    directory.mkdir()
    write_cache(seqio.TaskRegistry.get(name), str(directory))
    monkeypatch.setattr(seqio.utils, "_GLOBAL_CACHE_DIRECTORIES", [str(tmp_path)])
    for split in ("train", "validation"):
        cached = load(name, split, use_cached=True)
        made = load(name, split)
        assert sorted(fingerprints(cached)) == sorted(fingerprints(made))
        assert {k: v.dtype for k, v in cached[0].items()} == {
            k: v.dtype for k, v in made[0].items()
        }


def test_seqio_does_not_cut_the_end_of_a_sequence_off():
    lengths = {"query_ids": 32, "document_ids": 40, "document_segment_ids": 40}
    assert load("towns_ict", sequence_length=lengths)
    with pytest.raises(BadInputError, match=r"at least 40 for document_ids.* got 30"):
        load("towns_ict", sequence_length=lengths | {"document_ids": 30})


def test_a_name_is_registered_once(store):
    with pytest.raises(BadInputError, match="got 'towns_blocks'"):
        corpora.register("towns", store.directory)
    with pytest.raises(BadInputError, match="got 'to wns_blocks'"):
        corpora.register("to wns", store.directory)


def test_a_missing_corpus_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="expected a prepared corpus at"):
        corpora.register("nowhere", tmp_path)
    assert "nowhere_blocks" not in seqio.TaskRegistry.names()


def test_one_call_makes_a_corpus_of_documents(store, tmp_path):
    """The tasks are those of the corpus that was built another way, block by block."""
    texts = {}
    for text in store.texts(range(store.num_blocks)):
        texts.setdefault((text.source_id, text.title), []).append(text.body)
    with (tmp_path / "towns.jsonl").open("w") as file:
        for (source_id, title), bodies in texts.items():
            fields = {"id": source_id, "title": title, "text": " ".join(bodies)}
            file.write(json.dumps(fields) + "\n")

    def register(name, **options):
        corpora.register(
            name,
            tmp_path / "towns.jsonl",
            corpus=tmp_path / "corpus",
            tagger="rules",
            vocabulary=store.vocabulary,
            **({"document_length": 40, "validation_fraction": 0.2} | options),
            query_length=32,
            max_masks=6,
            num_shards=5,
        )

    register("made")
    assert BlockStore.open(tmp_path / "corpus").fingerprint == store.fingerprint
    assert fingerprints(load("made_salient")) == fingerprints(load("towns_salient"))
    made = (tmp_path / "corpus" / "corpus.json").stat().st_mtime_ns
    register("opened")
    assert (tmp_path / "corpus" / "corpus.json").stat().st_mtime_ns == made
    with pytest.raises(BadInputError, match="holds another corpus"):
        register("shorter", document_length=30)
    with pytest.raises(BadInputError, match="expected the name of a tagger"):
        corpora.register("object", "x.jsonl", corpus=tmp_path, tagger=RuleTagger())
    assert "object_blocks" not in seqio.TaskRegistry.names()


def test_an_empty_split_is_refused(store):
    corpora.register("all_train", store.directory, validation_fraction=0.0)
    with pytest.raises(BadInputError, match=r"split 'validation', got none .* of 0.0"):
        load("all_train_blocks", "validation")


def test_sentences_of_one_corpus_over_the_blocks_of_another(store, tmp_path):
    news = build_corpus(
        [
            Document(f"News {i}", f"Karel Dorm saw {i} mills in {1300 + i}.", f"n-{i}")
            for i in range(40)
        ],
        tmp_path / "news",
        vocabulary=store.vocabulary,
        tagger=RuleTagger(),
        chunk_length=40,
    )
    lengths = {"query_length": 32, "document_length": 40, "max_masks": 6}
    names = corpora.register(
        "news",
        news.directory,
        knowledge=store.directory,
        validation_fraction=0.2,
        **lengths,
    )
    assert names == [
        "news_salient",
        "news_terms",
        "news_random_tokens",
        "news_random_spans",
    ]
    examples = materialise("news_salient", "train", tmp_path / "examples")
    assert (examples.features["source_block"] == -1).all()
    # What they are of is no part of the corpus that is searched.
    assert (tmp_path / "examples/query_ids.npy").exists()
    # A trainer on the corpus that is searched takes them for its own.
    assert examples.metadata["corpus_fingerprint"] == store.fingerprint
    assert (
        examples.metadata["settings_fingerprint"] == (news.info["settings_fingerprint"])
    )


def test_sentences_in_another_vocabulary_are_refused(store, tmp_path):
    texts = ["Karel Dorm saw many mills in 1300."] * 3
    vocabulary = WordPiece.train(texts, 100, tmp_path / "vocab.txt")
    build_corpus(
        [Document("News", texts[0], "n")],
        tmp_path / "news",
        vocabulary=vocabulary,
        tagger=RuleTagger(),
        chunk_length=40,
    )
    with pytest.raises(BadInputError, match="vocabulary"):
        corpora.register("news", tmp_path / "news", knowledge=store.directory)
