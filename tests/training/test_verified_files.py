"""A flipped bit of what a stage reads is found before it trains."""

import dataclasses
import json
import logging
import pathlib
import shutil

import pytest

from realm_jax.cli.main import main
from realm_jax.data import store_files
from realm_jax.training import finetune, pretrain, warm_start
from tests.flipped import flip
from tests.refused import refused
from tests.tiny_run import GIN
from tests.training.runs import run_to_end


@pytest.fixture
def own_world(world, tmp_path):
    """A copy of the tiny world, to be damaged."""
    corpus = tmp_path / "corpus"
    shutil.copytree(world.corpus, corpus)
    return dataclasses.replace(world, corpus=str(corpus))


def test_a_stage_names_the_damaged_file(own_world, tmp_path):
    corpus = pathlib.Path(own_world.corpus)
    for stage, task in (
        (warm_start, "pairs/train"),
        (warm_start, "stated/train"),
        (pretrain, "asked/train"),
        (finetune, "questions/train"),
    ):
        example, *_ = (corpus / "examples" / task).glob("*.npy")
        for path in (corpus / "ids.npy", example):
            flip(path)
            with refused(rf"{path.name} is dam"):
                run_to_end(stage, own_world, tmp_path / stage.__name__)
            flip(path)
    assert not list(tmp_path.glob("*/checkpoints/*"))


def test_a_user_may_save_the_time(own_world, tmp_path):
    flip(pathlib.Path(own_world.corpus, "hashes.npy"))
    with refused(r"hashes\.npy is damaged"):
        run_to_end(warm_start, own_world, tmp_path, train_steps=0)
    run_to_end(warm_start, own_world, tmp_path, train_steps=0, verify_files=False)


def realm(command, model_dir, corpus, *files, **macros):
    """Runs a command; returns its exit code."""
    macros |= {"MODEL_DIR": model_dir, "CORPUS": corpus}
    words = [f"--gin_file={GIN / file}.gin" for file in files]
    return main([command, *words, *(f"--gin.{n}={v}" for n, v in macros.items())])


def test_the_index_builder_names_the_damaged_file(own_world, tmp_path, capfd):
    flip(pathlib.Path(own_world.corpus, "ids.npy"))
    places = tmp_path / "model", own_world.corpus
    assert realm("build-index", *places, "runs/build_index") == 2
    assert "ids.npy is damaged" in capfd.readouterr().err.strip().splitlines()[-1]


def test_a_stage_says_how_far_the_reading_of_a_large_corpus_is(
    own_world, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(store_files, "_WORTH_A_LINE", 1)
    monkeypatch.setattr(store_files, "_LINE_SECONDS", 0.0)
    # As in a process of its own.
    for name in ("realm_jax", store_files.__name__):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    flip(pathlib.Path(own_world.corpus, "ids.npy"))
    places = tmp_path / "model", own_world.corpus
    files = "models/tiny", "runs/warm_start"
    assert realm("warm-start", *places, *files, TASK="stated") == 2
    said = [record.getMessage() for record in caplog.records]
    lines = [line for line in said if line.endswith(f"GiB of {own_world.corpus}")]
    of_corpus = json.loads(pathlib.Path(own_world.corpus, "corpus.json").read_text())
    assert lines[0].startswith("verifying 0.0 GiB")
    assert len(lines) == 1 + len(of_corpus["files"])
    assert any(f"GiB of {own_world.corpus} in 0 s" in line for line in said)
