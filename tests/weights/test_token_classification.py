"""The checkpoint tagger against NumPy in float64, from the tensors in the file.

Its labels become spans as in a plain reading of BIO.
"""

import json

import flax.serialization
import flax.traverse_util
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.data.chunking import split_sentences
from realm_jax.data.salient_spans import Span, date_spans, merge
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.weights.token_classification import (
    CheckpointTagger,
    check_labels,
    load_token_classifier,
    windows,
    word_spans,
)
from tests.flipped import flip
from tests.refused import refused
from tests.weights.sentence_encoder_twin import bert
from tests.weights.tiny_classifier import (
    CONFIG,
    HIDDEN,
    LABELS,
    POSITIONS,
    VOCABULARY,
    edit_tensors,
    tensors_of_torch,
    write_checkpoint,
)

WORDS = ["Ansk", "burnt", "bells", "세종", "왕", "18", ",", "."]
# Of the tests of BIO labels alone, which have no model.
LETTERS = "bcdefgh"
BIO_VOCABULARY = WordPiece(
    [*SPECIAL_PIECES, *LETTERS, *(f"##{c}" for c in LETTERS), "the", "'", "s", "."]
)


def plain_logits(tensors, ids):
    """`BertForTokenClassification` of one sequence."""
    t = {name.removeprefix("bert."): x.astype(float) for name, x in tensors.items()}
    hidden = bert(t, CONFIG, ids, [0] * len(ids))
    return hidden @ t["classifier.weight"].T + t["classifier.bias"]


@pytest.fixture(scope="module")
def tensors():
    return tensors_of_torch()


def test_weights_that_flax_saved_are_the_same(tensors, tmp_path):
    """As `FlaxBertForTokenClassification` names and turns them."""
    folder = write_checkpoint(tmp_path, tensors)
    expected = load_token_classifier(folder).params
    renamed = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            kind = "kernel" if tensor.ndim == 2 else "scale"
            leaf = "embedding" if module.endswith("embeddings") else kind
        value = tensor.T if leaf == "kernel" else tensor
        renamed[f"{module}.{leaf}"] = np.ascontiguousarray(value)
    (folder / "model.safetensors").unlink()
    tree = flax.traverse_util.unflatten_dict(renamed, sep=".")
    (folder / "flax_model.msgpack").write_bytes(
        flax.serialization.msgpack_serialize(tree)
    )
    found = load_token_classifier(folder).params
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    (folder / "flax_model.msgpack").write_bytes(b"\xc1no msgpack")
    with refused(r"weights in .*flax_model.msgpack"):
        load_token_classifier(folder)


@pytest.fixture
def folder(tmp_path, tensors):
    return write_checkpoint(tmp_path, tensors)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory, tensors):
    return CheckpointTagger(
        write_checkpoint(tmp_path_factory.mktemp("tagger"), tensors)
    )


def plain_names(tensors, vocabulary, text):
    """Names of one text: a sentence at a time, a word at a time."""
    names = []
    for offset, sentence_end in split_sentences(text):
        encoding = vocabulary.encode(text[offset:sentence_end])
        words = []  # [start, end, label] in characters of the text
        for part in windows(vocabulary.is_inner[encoding.ids], POSITIONS - 2):
            row = [vocabulary.cls, *encoding.ids[part], vocabulary.sep]
            best = plain_logits(tensors, np.array(row))[1:-1].argmax(-1)
            places = encoding.offsets[part] + offset
            for piece, (start, end), label in zip(row[1:-1], places, best, strict=True):
                if VOCABULARY[piece].startswith("##"):
                    words[-1][1] = end
                else:
                    words.append([start, end, LABELS[label]])
        kind = None
        for start, end, label in words:
            if label[0] == "I" and label[2:] == kind:
                names[-1] = Span(names[-1].start, int(end), kind)
            elif label != "O":
                names.append(Span(int(start), int(end), label[2:]))
            kind = label[2:] if label != "O" else None
    return names


def test_logits_are_those_of_plain_bert(tagger, tensors):
    rng = np.random.default_rng(1)
    for length in (3, 9, 16):
        ids = rng.integers(5, len(VOCABULARY), length)
        padded = np.zeros((2, POSITIONS), np.int32)
        padded[1, :length] = ids
        found = np.asarray(tagger.classifier.logits(padded))[1, :length]
        np.testing.assert_allclose(
            found, plain_logits(tensors, ids), rtol=1e-4, atol=1e-4
        )


@settings(max_examples=40)
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from([*WORDS, "세종은", "1.", "8월 15일"]), max_size=30
        ).map(" ".join),
        max_size=4,
    )
)
def test_spans_are_those_of_one_word_at_a_time(tagger, tensors, texts):
    vocabulary = tagger.classifier.vocabulary
    found = tagger.tag(texts)
    assert len(found) == len(texts)
    for text, spans in zip(texts, found, strict=True):
        names = plain_names(tensors, vocabulary, text)
        assert spans == merge(date_spans(text), names)


def test_names_of_both_types_and_dates_are_found(tagger):
    spans = tagger.tag([" ".join(WORDS[first:] + WORDS[:first]) for first in range(8)])
    assert {span.label for found in spans for span in found} == {"PER", "LOC"}
    [spans] = tagger.tag(["왕 1945년 8월 15일"])
    assert spans[-1].end == len("왕 1945년 8월 15일")
    assert tagger.tag([""]) == [[]]


def test_the_name_tells_checkpoints_apart(folder, tagger, tensors):
    assert CheckpointTagger(folder).name == tagger.name
    changed = {**tensors, "classifier.bias": tensors["classifier.bias"] + 1}
    assert CheckpointTagger(write_checkpoint(folder, changed)).name != tagger.name
    assert tagger.name.startswith("checkpoint-")
    assert "dates-" in tagger.name


def test_the_name_tells_checkpoints_in_several_files_apart(folder):
    part = folder / "part.safetensors"
    (folder / "model.safetensors").rename(part)
    index = {"weight_map": {"classifier.bias": part.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = CheckpointTagger(folder).name
    flip(part)
    assert CheckpointTagger(folder).name != before


def test_its_tokenizer_reads_as_the_files_say(folder, tagger):
    assert not tagger.classifier.vocabulary.lowercase  # The vocabulary has an "A".
    normalizer = {"type": "BertNormalizer", "lowercase": True, "strip_accents": False}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"normalizer": normalizer}))
    changed = CheckpointTagger(folder)
    vocabulary = changed.classifier.vocabulary
    assert (vocabulary.lowercase, vocabulary.strip_accents) == (True, False)
    assert changed.name != tagger.name


def test_a_pooler_and_position_ids_of_older_exports_are_accepted(folder, tagger):
    def add(tensors):
        tensors["bert.pooler.dense.weight"] = np.ones((HIDDEN, HIDDEN), np.float32)
        tensors["bert.pooler.dense.bias"] = np.ones(HIDDEN, np.float32)
        tensors["bert.embeddings.position_ids"] = np.arange(POSITIONS)[None]

    edit_tensors(folder, add)
    ids = np.arange(5, 15)[None]
    np.testing.assert_array_equal(
        load_token_classifier(folder).logits(ids), tagger.classifier.logits(ids)
    )


def test_all_that_does_not_fit_is_named_in_one_line(folder):
    def damage(tensors):
        del tensors["bert.encoder.layer.1.output.dense.bias"]
        tensors["classifier.weight"] = np.zeros((3, HIDDEN), np.float32)
        tensors["bert.embeddings.LayerNorm.bias"] = np.zeros(3, np.float32)
        tensors["crf.transitions"] = np.zeros(3, np.float32)

    edit_tensors(folder, damage)
    for said in (
        r"encoder\.layer\.1\.output\.dense\.bias is missing",
        r"classifier\.weight is of shape \(3, 8\), not \(5, 8\)",
        r"embeddings\.LayerNorm\.bias has shape \(3,\)",
        r"crf\.transitions is not known",
        "4 in all",
    ):
        with refused(said):
            load_token_classifier(folder)


def test_files_that_do_not_fit_or_are_damaged_are_refused(folder):
    for changes, message in [
        ({"model_type": "roberta"}, "model type 'bert'.*'roberta'"),
        ({"id2label": {"0": "O", "2": "B-PER"}}, "got None"),
        ({"id2label": None}, "got none"),
        ({"vocab_size": 3}, "at most 3 wordpieces"),
        ({"hidden_act": "relu"}, "configuration of a BERT"),
    ]:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        with refused(message):
            load_token_classifier(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text("[1")
    with refused(r"tokenizer_config\.json"):
        load_token_classifier(folder)
    (folder / "tokenizer_config.json").unlink()
    for name in ("model.safetensors", "vocab.txt", "config.json"):
        (folder / name).write_bytes(b"\xff\xfe")
        with refused(name.replace(".", r"\.")):
            load_token_classifier(folder)
        (folder / name).unlink()
        with refused(name.replace(".", r"\.")):
            load_token_classifier(folder)


def spans_of(text, labels):
    encoding = BIO_VOCABULARY.encode(text)
    return word_spans(text, encoding, BIO_VOCABULARY.is_inner[encoding.ids], labels)


def test_articles_and_possessives_are_no_part_of_a_name():
    text = "the bc de's fg. 's"
    labels = ["B-PER", "I-PER", "O", "I-PER", "O", "I-PER", "I-PER"]
    labels += ["O", "O", "O", "B-LOC", "I-LOC"]
    encoding = BIO_VOCABULARY.encode(text)
    assert len(encoding) == len(labels)
    assert [text[a:b] for a, b, _ in spans_of(text, labels)] == ["bc de"]
    # Dates are those of the rules.
    assert spans_of("bc de", ["B-DATE", "O", "I-DATE", "O"]) == []


@given(
    is_inner=st.lists(st.booleans(), max_size=60).map(lambda x: np.array(x, bool)),
    room=st.integers(1, 9),
)
def test_windows_cover_everything_and_part_words_only_where_they_must(is_inner, room):
    found = windows(is_inner, room)
    places = [place for part in found for place in range(part.start, part.stop)]
    assert places == list(range(len(is_inner)))
    assert all(0 < part.stop - part.start <= room for part in found)
    for part in found[:-1]:
        following = is_inner[part.start + 1 : part.start + room + 1]
        # As long as it can be without parting a word; one is parted only if too long.
        later = [part.start + 1 + i for i in np.flatnonzero(~following)]
        assert part.stop == (later[-1] if later else part.start + room)


def test_labels_of_another_kind_are_refused():
    check_labels(["O", "B-PER", "I-PER"], "here")
    check_labels(["I-PER", "O"], "here")
    for labels in (["LABEL_0", "LABEL_1"], ["O"], [], ["O", "PER"], ["O", "S-PER"]):
        with refused(r"expected labels .* in here, got "):
            check_labels(labels, "here")
