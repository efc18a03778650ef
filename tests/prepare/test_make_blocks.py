"""Records to blocks, part by part, and what is counted on the way."""

import json

import pytest

from realm_jax.cli.prepare import summary as told
from realm_jax.data.blocks import BlockStore
from realm_jax.data.wordpiece import WordPiece
from realm_jax.prepare import blocks
from realm_jax.prepare.block_parts import Summary, unpack_blocks
from realm_jax.prepare.documents.open import open_source
from tests import tiny_run
from tests.refused import refused


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("make_blocks")
    tiny_run.make_inputs(root)
    return root


@pytest.fixture(scope="module")
def vocabulary(inputs):
    texts = [json.loads(line)["text"] for line in lines_of(inputs)]
    return WordPiece.train(texts, 300, inputs / "vocab.txt")


def lines_of(inputs):
    return (inputs / "articles.jsonl").read_text().splitlines()


def build(folder, lines, vocabulary, *, max_bad_lines=0, shard_bytes=2000):
    """Builds folder/corpus of these lines; every part is made as a worker makes it."""
    folder.mkdir()
    (folder / "lines.jsonl").write_text("\n".join(lines))
    source = open_source(str(folder / "lines.jsonl"), shard_bytes=shard_bytes)
    shards = source.shards()
    names = blocks.part_names(len(shards))
    make = blocks.MakeBlocks(
        source,
        dict(zip(names, shards, strict=True)),
        vocabulary,
        tagger="rules",
        chunk_length=40,
        max_bad_lines=max_bad_lines,
    )
    parts = [make(name, lambda: None) for name in names]
    return blocks.assemble(
        str(folder / "corpus"),
        iter(parts),
        vocabulary=vocabulary,
        chunk_length=40,
        max_bad_lines=max_bad_lines,
        metadata={},
    )


def hashes(store: BlockStore):
    texts = store.texts(range(store.num_blocks))
    keys = [(text.title, text.body) for text in texts]
    return dict(zip(keys, map(bytes, store.content_hashes), strict=True))


def test_what_was_not_used_is_counted(inputs, vocabulary, tmp_path):
    lines = lines_of(inputs)
    lines[7:7] = ["no JSON"]
    lines[30:30] = ['{"title": "", "text": "Nameless stands alone here."}']
    lines += ['{"title": "Empty", "text": " "}', lines[0]]
    store = build(tmp_path / "a", lines, vocabulary, max_bad_lines=1)
    counts = Summary.from_json(store.info["summary"])
    assert counts.documents == store.info["num_documents"] == 63
    assert counts.without_text == counts.without_title == counts.bad_records == 1
    [first] = counts.first_bad
    assert first.where.endswith("line 8")
    town = sum(text.title == "Town0" for text in store.texts(range(store.num_blocks)))
    # The article that came twice.
    assert store.info["num_duplicate_blocks"] * 2 == town > 0
    said = " ".join(told(store.info))
    for words in ("63 documents", "1 damaged", "1 without a title", "line 8"):
        assert words in said


def test_more_damage_than_can_be_borne_leaves_nothing(inputs, vocabulary, tmp_path):
    lines = lines_of(inputs)
    lines[3], lines[50] = "{}", "{}"
    # In parts of their own, and in one.
    for size in (2000, 1 << 20):
        folder = tmp_path / str(size)
        with refused(r"line 4: .*2 damaged.*max_bad_lines=1"):
            build(folder, lines, vocabulary, max_bad_lines=1, shard_bytes=size)
        assert [path.name for path in folder.iterdir()] == ["lines.jsonl"]


def test_a_block_keeps_its_hash_when_others_come_and_go(inputs, vocabulary, tmp_path):
    all_of_them = hashes(build(tmp_path / "a", lines_of(inputs), vocabulary))
    fewer = hashes(build(tmp_path / "b", lines_of(inputs)[5:], vocabulary))
    assert len(set(all_of_them.values())) == len(all_of_them)
    assert fewer == {key: all_of_them[key] for key in fewer}
    assert 0 < len(fewer) < len(all_of_them)


def test_a_part_is_a_function_of_its_records(inputs, vocabulary, tmp_path):
    source = open_source(str(inputs / "articles.jsonl"))
    [shard] = source.shards()
    make = blocks.MakeBlocks(source, {"x": shard}, vocabulary, "rules", 40, 0)
    part = make("x", lambda: None)
    assert part == make("x", lambda: None)
    made, rows, counts = unpack_blocks(part)
    titles = [block.text.title for block in made]
    assert titles == sorted(titles, key=lambda title: int(title[4:]))
    assert counts.documents == len(rows) == 60
