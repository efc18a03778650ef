import json

import pytest

from bench import open_qa
from realm_jax.data.questions import read_questions
from realm_jax.prepare.open_qa.sets import is_dev
from tests.json_lines import write_lines
from tests.refused import refused


@pytest.fixture
def folder(tmp_path):
    """Three sets, of which one has a dev file, and passages that answer one of them."""
    for split in ("train", "dev"):
        asked = [
            {"question": f"{split} {i}?", "answers": ["a"], "gold_ids": [f"{split}{i}"]}
            for i in range(9)
        ]
        write_lines(tmp_path / f"entityquestions_some.{split}.jsonl", asked)
    asked = [{"question": f"who is {i}?", "answers": ["b", "c"]} for i in range(60)]
    write_lines(tmp_path / "webquestions.train.jsonl", asked)
    asked = [{"question": f"when {i}?", "answer_regex": "Sept?|Oct"} for i in range(3)]
    write_lines(tmp_path / "curatedtrec.train.jsonl", asked)
    ids = [f"{split}{i}" for i in range(9) for split in ("train", "dev")]
    write_lines(
        tmp_path / "text.jsonl", [{"id": i, "title": i, "text": "t"} for i in ids]
    )
    return tmp_path


def test_the_sets_have_their_splits_and_the_text_has_what_dev_asks_for(folder):
    path = folder / "passages.jsonl"
    kept = open_qa.write_text(str(folder / "text.jsonl"), folder, 4, path)
    # Lines are counted from 1: those of 4, 8, 12 and 16 are of dev.
    assert kept == {f"dev{i}" for i in range(9)}
    assert {json.loads(line)["id"] for line in path.read_text().splitlines()} == kept
    every = open_qa.write_text(str(folder / "text.jsonl"), folder, 1, path)
    assert len(every) == 18

    open_qa.write_sets(folder, kept | {"train3"}, folder / "sets")
    known = read_questions(folder / "sets" / "EntityQuestions.jsonl")
    assert [q.question for q in known if q.split == "train"] == ["train 3?"]
    assert sum(q.split == "dev" for q in known) == 9
    asked = read_questions(folder / "sets" / "WebQuestions.jsonl")
    held_out = is_dev([q.question for q in asked])
    assert [q.split == "dev" for q in asked] == held_out.tolist()
    assert 0 < held_out.sum() < 20
    [*_, last] = read_questions(folder / "sets" / "CuratedTREC.jsonl")
    assert last.answers_are_patterns
    assert last.answers == ("Sept?|Oct",)
    together = read_questions(folder / "sets" / "all.jsonl")
    assert len(together) == 10 + 60 + 3
    assert [q.index for q in together] == list(range(73))


def test_a_set_that_is_missing_is_named(folder):
    (folder / "webquestions.train.jsonl").unlink()
    with refused(r"expected webquestions\.train\.jsonl"):
        open_qa.write_sets(folder, set(), folder / "sets")
