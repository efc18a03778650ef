"""Questions about articles that a corpus does not have."""

from realm_jax.data.documents import Document
from realm_jax.data.question_titles import describe_unknown_titles, unknown_titles
from realm_jax.data.questions import Question
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.corpus_builder import build_corpus


def asked(*titles):
    return [Question(str(i), i, "?", ("x",), "test", t) for i, t in enumerate(titles)]


def test_unknown_articles_are_counted_and_a_few_are_named():
    questions = asked("graz", "Wien_", None, "A", "A", "B", "C", "D", "E")
    line = describe_unknown_titles(questions, {"Graz", "Wien"}) or ""
    assert line.startswith("6 of 8 questions with a title name an article")
    assert ": 'A', 'B', 'C' and 2 more;" in line
    assert describe_unknown_titles(questions[:3], {"Graz", "Wien"}) is None


def test_a_corpus_says_which_articles_it_has(tmp_path):
    documents = [
        Document(title, "It burnt down. " * 5, title) for title in ("Čerkov", "R & B")
    ]
    vocabulary = WordPiece([*SPECIAL_PIECES, "it", "burnt", "down", "."])
    corpus = build_corpus(
        documents,
        tmp_path / "corpus",
        vocabulary=vocabulary,
        tagger=RuleTagger(),
        chunk_length=9,
    )
    assert corpus.num_blocks > len(documents)
    known = asked("C\u030cerkov", "R_&amp;_B", " r  & B")
    assert unknown_titles(corpus, known) is None
    assert "1 of 4" in (unknown_titles(corpus, [*known, *asked("Q")]) or "")
    assert unknown_titles(None, asked(None)) is None  # pyright: ignore
