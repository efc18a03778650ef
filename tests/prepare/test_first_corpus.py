"""A first corpus of one's own: a few articles as they come from any editor."""

import gzip
import json
import re
import string

import numpy as np
import pytest

from realm_jax.cli.main import main
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.questions import read_questions
from realm_jax.data.wordpiece import SPECIAL_PIECES
from realm_jax.prepare import examples
from tests import tiny_run

ARTICLE = {"title": "Graz", "text": "Karl Huber founded Graz in 1128. It burnt down."}
QUESTION = {"id": "1", "question": "Who?", "answers": ["x"], "split": "train"}
LATIN = '{"title": "Köln", "text": "Köln."}\n'.encode("latin-1")


def arguments(**macros):
    given = {"CORPUS": "corpus", "SOURCE": "articles.jsonl", "NAME": "my", **macros}
    return [
        *("prepare", "--gin_file=gin/runs/prepare.gin"),
        *(f"--gin.{name}={str(value)!r}" for name, value in given.items()),
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples.register.cache_clear()  # What it registered, other tests have removed.
    return tmp_path


def test_a_source_or_questions_that_are_no_json_lines_are_named(folder, capsys):
    """In one line, and nothing is left."""
    gzipped = gzip.compress(b"{}", mtime=0)
    (folder / "texts").mkdir()
    (folder / "articles.jsonl").write_text(json.dumps(ARTICLE))
    for name, content, said in [
        ("a.jsonl", LATIN, "a.jsonl, line 1: expected the line in UTF-8, got the byte"),
        ("a.jsonl", gzipped, r"line 1: .*got gzipped data; .* in \.gz"),
        ("a.jsonl.gz", b"{}", r"a\.jsonl\.gz, but it is damaged.*correct the suffix"),
        ("a.jsonl", b"\n\r\n", "documents with text in a.jsonl, got 0 without"),
        ("a.jsonl", b'{"title": "a", "text": ""}', "in a.jsonl, got 1 without any"),
        ("a.json", b'[\n{"title": "a"}]', r"a.json, line 1: .*JSON object, got \["),
        ("json:texts", None, r"a folder; name the files in it, such as texts/\*"),
        ("q.jsonl", b'{"id": "1"}', "q.jsonl:1: expected 'question'"),
    ]:
        if content is not None:
            (folder / name).write_bytes(content)
        given = {"QUESTIONS" if name == "q.jsonl" else "SOURCE": name}
        before = sorted(folder.rglob("*"))
        assert main(arguments(**given)) == 2
        assert sorted(folder.rglob("*")) == before
        [line] = capsys.readouterr().err.splitlines()
        assert re.search(said, line), (said, line)


@pytest.mark.usefixtures("registry")
def test_twenty_articles_are_enough_without_any_setting(folder, capsys):
    """With a byte order mark and the line ends of Windows."""
    tiny_run.make_inputs(folder, num_articles=20)
    for name in ("articles.jsonl", "questions.jsonl"):
        lines = (folder / name).read_bytes()
        (folder / name).write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"))
    with (folder / "questions.jsonl").open("a") as file:
        file.write(json.dumps(QUESTION | {"question": "Où est Žižkov №3?"}))
    assert "?" not in (folder / "articles.jsonl").read_text()
    assert main(arguments(QUESTIONS="questions.jsonl")) == 0
    store = BlockStore.open("corpus")
    assert store.info["num_documents"] == 20
    articles = {
        split: {store.text(block).source_id for block in blocks}
        for split, blocks in blocks_of_splits().items()
    }
    assert len(articles["validation"]) == 1
    assert len(articles["train"]) == 19
    assert not articles["validation"] & articles["train"]
    texts = [question.question for question in read_questions("questions.jsonl")]
    words = [f"{letter}a{letter}" for letter in string.ascii_letters + string.digits]
    for text in [*texts, *words, *string.punctuation, "“Is it — or ‘not’…?”"]:
        assert store.vocabulary.unk not in store.vocabulary.encode(text).ids, text
    # Other settings are named before anything is said to be done.
    capsys.readouterr()
    pieces = (folder / "corpus" / "vocab.txt").read_text()
    (folder / "vocab.txt").write_text(pieces + "more\n")
    for name, value in {"TAGGER": "given", "VOCABULARY": "vocab.txt"}.items():
        assert main(arguments(SOURCE="", **{name: value})) == 2
        said = capsys.readouterr()
        assert name in said.err
        assert "done" not in said.out


@pytest.mark.usefixtures("registry")
def test_text_and_questions_are_read_as_the_weights_tokenizer_does(folder, capsys):
    settings = {"do_lower_case": False, "tokenize_chinese_chars": False}
    body = "Café Graz , 東京 , in [UNK] ."
    words = "Café Graz café cafe graz , in 東 京 東京 ."
    pieces = [*SPECIAL_PIECES, *words.split()]
    (folder / "weights").mkdir()
    (folder / "weights/vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    (folder / "weights/tokenizer_config.json").write_text(json.dumps(settings))
    text = "Café Graz, 東京, in 1128."
    articles = [{"title": f"Town {i}", "text": text} for i in range(4)]
    (folder / "articles.jsonl").write_text("\n".join(map(json.dumps, articles)))
    question = QUESTION | {"question": text, "answers": ["Graz"]}
    (folder / "questions.jsonl").write_text(json.dumps(question))
    given = {"VOCABULARY": "weights/vocab.txt", "QUESTIONS": "questions.jsonl"}
    command = [*arguments(**given), "--gin.EXAMPLES=['questions']"]
    assert main([*command, "--gin.prepare.PrepareConfig.lowercase=True"]) == 2
    expected = "expected lowercase=False as in weights/tokenizer_config.json, got "
    assert expected in capsys.readouterr().err
    assert not (folder / "corpus").exists()
    assert main(command) == 0
    store = BlockStore.open("corpus")
    questions = Examples.open("corpus/examples/my_questions/train")
    asked = questions.features["question_ids"][0][1:]  # [CLS] is first.
    for ids in (store.body_ids(np.array(0), 20), asked):
        found = [store.vocabulary.pieces[i] for i in ids]
        assert " ".join(found[: len(body.split())]) == body


def blocks_of_splits():
    """The blocks whose sentences were masked, by split."""
    found = {}
    for split in ("train", "validation"):
        masked = Examples.open(f"corpus/examples/my_salient/{split}")
        found[split] = set(masked.features["source_block"][:].tolist())
    return found


@pytest.mark.usefixtures("registry")
def test_a_book_is_held_out_from_by_the_block(folder):
    towns = (f"Karl Huber founded Graz{i} in {1100 + i}." for i in range(400))
    book = {"title": "A Gazetteer", "text": " ".join(towns)}
    (folder / "articles.jsonl").write_text(json.dumps(book))
    shorter = "--gin.prepare.PrepareConfig.chunk_length=48"
    share = "--gin.prepare.PrepareConfig.validation_fraction=0.1"
    assert main([*arguments(), shorter, share]) == 0
    blocks = blocks_of_splits()
    count = BlockStore.open("corpus").num_blocks
    assert blocks["train"] | blocks["validation"] == set(range(count))
    assert not blocks["train"] & blocks["validation"]
    assert 0.03 < len(blocks["validation"]) / count < 0.2


@pytest.mark.usefixtures("registry")
def test_a_single_article_is_refused_by_a_setting(folder, capsys):
    (folder / "articles.jsonl").write_text(json.dumps(ARTICLE))
    assert main(arguments()) == 2
    said = capsys.readouterr().err
    assert "expected articles in the split 'train'" in said
    assert "prepare.PrepareConfig.validation_fraction" in said
    assert not list(folder.glob("corpus/examples/*"))
