"""Real Korean text through every step: none may assume ASCII, English or capitals."""

import unicodedata

import pytest

from realm_jax.data.dates import find_dates
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import WordPiece
from tests.corpus_builder import build_corpus
from tests.data.korean_articles import ARTICLES, SENTENCES

DOCUMENTS = [
    Document(title, " ".join(sentence.text for sentence in sentences), f"ko-{title}")
    for title, sentences in ARTICLES.items()
]
TEXTS = [document.text for document in DOCUMENTS]


@pytest.fixture(scope="module", params=[False, True], ids=["cased", "uncased"])
def store(request, tmp_path_factory):
    """The articles in blocks of a few sentences, in a vocabulary trained on them."""
    directory = tmp_path_factory.mktemp("korean")
    path = directory / "vocab.txt"
    vocabulary = WordPiece.train(TEXTS, 700, path, lowercase=request.param)
    return build_corpus(DOCUMENTS, directory / "corpus", vocabulary, chunk_length=64)


def plain(text):
    """Without what BERT's rules for case, accents and spaces change in this text."""
    return unicodedata.normalize("NFC", text.lower()).replace(" ", "")


def test_dates_and_marked_names_are_those_a_reader_marks():
    for text, dates, marked in SENTENCES:
        assert [text[start:end] for start, end in find_dates(text)] == dates
        [spans] = RuleTagger().tag([text])
        found = {"DATE": [], "NAME": [], "NUMBER": []}
        for start, end, label in spans:
            found[label].append(text[start:end])
        assert found["DATE"] == dates
        assert sorted(found["NAME"] + found["NUMBER"]) == sorted(marked)


def test_nothing_is_unknown_and_no_character_is_lost(store):
    assert store.num_blocks > len(ARTICLES)
    bodies, sentences = dict.fromkeys(ARTICLES, ""), []
    for text in store.texts(range(store.num_blocks)):
        bodies[text.title] += text.body
        sentences += [text.body[start:end] for start, end in text.sentences]
        ids = store.vocabulary.encode(text.body).ids
        assert store.vocabulary.unk not in ids
        assert plain(store.vocabulary.decode(ids)) == plain(text.body)
    for document in DOCUMENTS:
        assert plain(bodies[document.title]) == plain(document.text)
    assert sentences == [sentence.text for sentence in SENTENCES]


def test_bert_parts_syllables_and_decoding_joins_them(tmp_path):
    uncased = WordPiece.train(TEXTS, 700, tmp_path / "vocab.txt")
    encoding = uncased.encode("세종")
    pieces = "".join(uncased.pieces[i].removeprefix("##") for i in encoding.ids)
    assert pieces == unicodedata.normalize("NFD", "세종") != "세종"
    # Every letter stands for the syllable it came from; a span masks all of them.
    assert set(map(tuple, encoding.offsets.tolist())) <= {(0, 1), (1, 2), (0, 2)}
    assert uncased.decode(encoding.ids) == "세종"


def test_accents_kept_keep_syllables_whole(tmp_path):
    kept = WordPiece.train(TEXTS, 700, tmp_path / "vocab.txt", strip_accents=False)
    assert kept.lowercase
    assert not any("\u1100" <= c <= "\u11ff" for piece in kept.pieces for c in piece)
    assert kept.decode(kept.encode("NASA는 세종").ids) == "nasa는 세종"
    loaded = WordPiece.load(tmp_path / "vocab.txt", strip_accents=False)
    assert loaded.fingerprint == kept.fingerprint
    # The same pieces under BERT's own rule would never be met by Korean text.
    assert kept.fingerprint != WordPiece.load(tmp_path / "vocab.txt").fingerprint
    wrong = WordPiece.load(tmp_path / "vocab.txt")
    assert set(wrong.encode("세종은").ids) == {wrong.unk}
    uncased = WordPiece.train(TEXTS, 700, tmp_path / "uncased.txt")
    shorter, longer = (
        sum(len(encoding) for encoding in vocabulary.encode_batch(TEXTS))
        for vocabulary in (kept, uncased)
    )
    assert shorter < longer
