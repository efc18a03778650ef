"""Following the versions of a corpus, and refusing what was moved by half."""

import json
import shutil

import numpy as np
import pytest

from realm_jax.data import versions
from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockText
from realm_jax.data.versions import link_versions, newest_version
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.refused import refused

WORDPIECE = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(60))])


def write(directory, number):
    ids = np.array([10 + number], np.int32)
    block = Block(ids, ids, BlockText("", f"w{number}", "a", [(0, 2)], []))
    settings = {"vocabulary": WORDPIECE, "chunk_length": 16}
    return write_blocks(directory, [block], **settings).directory


@pytest.fixture
def chain(tmp_path):
    """Three versions, each the successor of the one before."""
    folders = [write(tmp_path / "all" / f"v{i}", i) for i in range(3)]
    link_versions(folders[0], folders[1])
    link_versions(folders[1], folders[2])
    return folders


def test_the_newest_version_is_found_from_any_wherever_they_are(chain, tmp_path):
    assert [newest_version(folder) for folder in chain] == [chain[2].resolve()] * 3
    assert newest_version(str(chain[0])) == chain[2].resolve()
    parent = json.loads((chain[2] / versions.PARENT_FILE).read_text())
    assert (chain[2] / parent["corpus"]).resolve() == chain[1].resolve()
    # Moved together, and reached by a link.
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "all", moved)
    (tmp_path / "link").symlink_to(moved / "v0")
    for place in (moved / "v0", tmp_path / "link"):
        assert newest_version(place) == (moved / "v2").resolve()


def test_without_successor_it_is_the_newest_as_it_was_named(tmp_path, monkeypatch):
    write(tmp_path / "v0", 0)
    monkeypatch.chdir(tmp_path)
    assert str(newest_version("v0")) == "v0"
    with refused("expected a prepared corpus at none"):
        newest_version("none")


def test_a_successor_that_is_not_there_is_named(chain):
    shutil.move(chain[2], chain[2].with_name("moved"))
    with refused(r"next version of .*v1 at .*v2, which"):
        newest_version(chain[0])
    write(chain[2], 7)
    with refused(r"expected the corpus \w+ at .*v2.* got"):
        newest_version(chain[0])
    for content in ("{", "[]", '{"corpus": "../v1"}', '"x"'):
        (chain[0] / versions.SUCCESSOR_FILE).write_text(content)
        with refused(r"v0/successor\.json, but it cannot be"):
            newest_version(chain[0])


def test_a_circle_ends(chain):
    (chain[1] / versions.PARENT_FILE).unlink()
    link_versions(chain[2], chain[1])
    with refused(r"v1 again in .*v2/successor\.json"):
        newest_version(chain[0])


def test_a_second_successor_is_refused_and_the_same_one_is_not(chain, tmp_path):
    before = (chain[0] / versions.SUCCESSOR_FILE).read_bytes()
    link_versions(chain[0], chain[1])
    versions.require_no_other_successor(chain[0], chain[1])
    other = write(tmp_path / "other", 9)
    for check in (versions.require_no_other_successor, link_versions):
        with refused(r"v0 to have no successor yet, got"):
            check(chain[0], other)
    assert (chain[0] / versions.SUCCESSOR_FILE).read_bytes() == before
    with refused(r"v2 to be made from .*other, but its"):
        link_versions(other, chain[2])
    assert not (other / versions.SUCCESSOR_FILE).exists()
