"""From documents to a block store."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import BertPreTokenizer

from realm_jax.data.chunking import divide
from realm_jax.data.corpus import chunk_each
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import PreAnnotated, RuleTagger, Span
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.corpus_builder import build_corpus

DOCUMENTS = [
    Document(
        title="Pierre de Fermat",
        text="Pierre de Fermat was a French mathematician. He was born in 1607 near "
        "Toulouse.\n\nThe mathematician found that 3 is a prime of a certain kind. "
        "Only five of them are known.",
        source_id="fermat",
    ),
    Document(title="Nothing", text=" \n", source_id="nothing"),
    Document(
        title="Łódź",
        text="Łódź is a city in Poland. 𝒳 lies near Ávila. It grew in the "
        "19th century.",
        source_id="lodz",
    ),
    Document(title="", text="A text without title.", source_id="untitled"),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    texts = [document.text for document in DOCUMENTS] * 3
    return WordPiece.train(texts, 120, path)


def build(directory, vocabulary, documents=DOCUMENTS, chunk_length=32, **settings):
    settings["chunk_length"] = chunk_length
    return build_corpus(documents, directory, vocabulary, **settings)


def quoted(text, ranges):
    return [text[start:end] for start, end, *_ in ranges]


def test_spans_stand_where_the_tagger_saw_them(tmp_path, vocabulary):
    store = build(tmp_path / "corpus", vocabulary)
    texts = store.texts(range(store.num_blocks))
    spans = [span for text in texts for span in quoted(text.body, text.spans)]
    expected = "Pierre de Fermat|French|1607|Toulouse|Poland|Ávila|19th century"
    assert spans == expected.split("|")
    sentences = [s for text in texts for s in quoted(text.body, text.sentences)]
    assert sentences[:2] == [
        "Pierre de Fermat was a French mathematician.",
        "He was born in 1607 near Toulouse.",
    ]


def test_given_spans_are_kept_if_a_sentence_holds_them(tmp_path, vocabulary):
    # Unordered; one reaches over the end of a sentence.
    spans = (Span(27, 33, "GPE"), Span(0, 5, "GPE"), Span(9, 18, "NONE"))
    text = "Paris is big. Rome is old. Vienna is far."
    documents = [
        Document("Cities", text, "cities", spans=spans),
        Document("Plain", "It saw Rome.", "plain"),
    ]
    store = build(tmp_path / "c", vocabulary, documents, chunk_length=24)
    texts = store.texts(range(store.num_blocks))
    assert len(texts) > 2
    found = [(t.title, *quoted(t.body, t.spans)) for t in texts if t.spans]
    assert found == [("Cities", "Paris"), ("Cities", "Vienna"), ("Plain", "Rome")]
    without = build(tmp_path / "d", vocabulary, tagger=PreAnnotated())
    assert (without.info["num_spans"], without.info["tagger"]) == (0, "given")


WORDS = ["Fermat", "was", "born. ", "He ", "found! ", "1607", *"é𝒳\u200b", "\n\n"]
TEXTS = st.text(max_size=50) | st.lists(st.sampled_from(WORDS)).map(" ".join)


@given(texts=st.lists(TEXTS, max_size=4), chunk_length=st.integers(8, 40))
def test_blocks_of_any_text_hold_its_wordpieces_once(vocabulary, texts, chunk_length):
    documents = [Document("Title", text, str(i)) for i, text in enumerate(texts)]
    made = chunk_each(documents, vocabulary, RuleTagger(), chunk_length)
    excess = 0
    for document, own in zip(documents, made.blocks, strict=True):
        assert {block.text.source_id for block in own} <= {document.source_id}
        pieces = [piece for block in own for piece in block.body_ids.tolist()]
        assert pieces == vocabulary.encode(document.text).ids.tolist()
        for block in own:
            body = block.text.body
            assert block.body_ids.tolist() == vocabulary.encode(body).ids.tolist()
            assert quoted(body, block.text.spans) == [
                span.strip() for span in quoted(body, block.text.spans)
            ]
            length = 3 + len(block.title_ids) + len(block.body_ids)
            excess += max(0, length - chunk_length)
            if length > chunk_length:
                # It is one word for BERT.
                assert len(BertPreTokenizer().pre_tokenize_str(body)) == 1
    assert made.unread_pieces == excess


PARTS = {
    "aa bb cc dd. ee ff; gg hh ii jj kk ll": "aa bb cc dd.|ee ff;|gg hh ii jj kk|ll",
    "aa bb\ncc dd\nee ff gg hh": "aa bb\ncc dd|ee ff gg hh",
    "aa bb cc dd ee ff gg hh": "aa bb cc dd ee|ff gg hh",
    # A mark right at the beginning would leave a block all but empty.
    "a, bb cc dd ee ff gg hh": "a, bb cc dd|ee ff gg hh",
    "aa bb cc dd ee": "aa bb cc dd ee",
    "abababababab cc": "abababababab|cc",
}


def test_what_is_longer_than_a_block_is_divided():
    letters = "abcdefghijkl"
    pieces = [f"{c}{c}" for c in letters] + [*letters, *(f"##{c}" for c in letters)]
    vocabulary = WordPiece([*SPECIAL_PIECES, *pieces, *".,;"])
    for text, parts in PARTS.items():
        offsets = vocabulary.encode(text).offsets
        starts = [int(offsets[piece, 0]) for piece in divide(text, offsets, 5)]
        bounds = itertools.pairwise([*starts, len(text)])
        assert [text[start:end].strip() for start, end in bounds] == parts.split("|")


def test_chinese_is_divided_where_its_tokenizer_begins_words():
    pieces = [*SPECIAL_PIECES, "中文", "##字", "##中文", "、", "t"]
    text = "中文字中文字、中文字中文" * 6
    document = Document("t", text, "0", sentences=[(0, 4), (4, len(text))])
    for tokenize_chinese_chars in (True, False):
        vocabulary = WordPiece(pieces, tokenize_chinese_chars=tokenize_chinese_chars)
        made = chunk_each([document], vocabulary, RuleTagger(), 9)
        bodies = [block.text.body for block in made.blocks[0]]
        assert len(bodies) > 6
        assert "".join(bodies) == text
        for block in made.blocks[0]:
            again = vocabulary.encode(block.text.body).ids
            assert block.body_ids.tolist() == again.tolist()


def test_a_title_leaves_half_of_a_block_to_the_text(vocabulary):
    title = "Pierre de Fermat was born " * 20
    document = Document(title, DOCUMENTS[0].text, "long")
    made = chunk_each([document, DOCUMENTS[0]], vocabulary, RuleTagger(), 33)
    assert (made.shortened_titles, made.unread_pieces) == (1, 0)
    [blocks, _] = made.blocks
    for block in blocks:
        assert block.title_ids.tolist() == vocabulary.encode(title).ids[:15].tolist()
        assert block.text.title == title
    pieces = [piece for block in blocks for piece in block.body_ids.tolist()]
    assert pieces == vocabulary.encode(document.text).ids.tolist()
