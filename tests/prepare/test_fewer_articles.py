"""The articles of a smaller corpus, against the rules that they are chosen by."""

import json

import pytest

from realm_jax.data.documents import is_held_out
from realm_jax.prepare import fewer_articles
from tests.json_lines import write_lines

NAMES = [f"article {i}" for i in range(1000)]
ARTICLES = [{"id": n.replace(" ", "_"), "title": n, "text": "x\u2028y"} for n in NAMES]
ASKED = ["article 3", "article 500"]


@pytest.fixture
def paths(tmp_path):
    asked = [
        {"id": t, "question": "?", "answers": ["x"], "title": t, "split": "dev"}
        for t in ASKED
    ]
    articles = write_lines(tmp_path / "articles.jsonl", ARTICLES)
    questions = write_lines(tmp_path / "questions.jsonl", asked)
    return articles, questions, str(tmp_path / "fewer.jsonl")


def read(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_keeps_what_is_asked_about_and_held_out_and_draws_the_rest(paths):
    assert fewer_articles.main([*paths, "--drawn", "100"]) == 0
    kept = read(paths[2])
    titles = [article["title"] for article in kept]
    assert kept == [article for article in ARTICLES if article["title"] in titles]
    held_out = {a["title"] for a in ARTICLES if is_held_out(a["id"])}
    assert held_out
    assert {*ASKED, *held_out} <= set(titles)
    # Of those drawn, some are held out as well.
    assert 100 + len(ASKED) <= len(titles) <= 100 + len(ASKED) + len(held_out)


def test_another_seed_draws_others_and_the_same_one_the_same(paths):
    drawn = []
    for seed in ("0", "0", "1"):
        fewer_articles.main([*paths, "--drawn", "100", "--seed", seed])
        drawn.append(read(paths[2]))
    assert drawn[0] == drawn[1] != drawn[2]


def test_articles_without_title_or_with_a_number_as_id_are_drawn_too(paths):
    untitled = [{"id": i, "title": None, "text": "x"} for i in range(50)]
    write_lines(paths[0], untitled)
    assert fewer_articles.main([*paths, "--drawn", "5"]) == 0
    held_out = sum(is_held_out(str(article["id"])) for article in untitled)
    assert 5 <= len(read(paths[2])) <= 5 + held_out


def test_what_cannot_be_done_is_one_line(paths, tmp_path, capsys):
    (tmp_path / "bad").write_text("no JSON\n")
    (tmp_path / "no text").write_text('{"id": "a", "title": "a"}\n')
    for arguments, said in [
        ([str(tmp_path / "bad"), *paths[1:], "--drawn", "1"], "bad"),
        ([str(tmp_path / "no text"), *paths[1:], "--drawn", "1"], "no text:1"),
        ([*paths, "--drawn", "-1"], "-1"),
        ([*paths[:2], "no/such/f", "--drawn", "1"], "no/such/f"),
        (["nowhere", *paths[1:], "--drawn", "1"], "nowhere"),
    ]:
        assert fewer_articles.main(arguments) == 2, arguments
        [line] = capsys.readouterr().err.splitlines()
        assert said in line
