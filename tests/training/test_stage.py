"""What stages have in common: resuming, sources, gradients that are not finite."""

import dataclasses
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from realm_jax.data.examples import write_examples
from realm_jax.index.snapshots import RETRIEVER_SERIES, SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.run_record import Attempt
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain, recorded, stage, warm_start
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.stage import Stage, open_examples
from realm_jax.training.warm_start import ReaderMixture
from tests import tiny_world
from tests.records import as_earlier_version, change_details
from tests.refused import refused
from tests.tiny_world import LENGTHS, NEVER, differing, poisoned, silent
from tests.training.conftest import quick_loss
from tests.training.runs import CONFIGS, arrays_of, run_to_end, stop_run


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """Model directory of a warm start of three updates."""
    folder = tmp_path_factory.mktemp("done")
    with mock.patch.object(warm_start, "WarmStartLoss", quick_loss):
        run_to_end(warm_start, world, folder)
    return folder


def files_of(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_another_run_or_fewer_updates_are_refused(world, other_world, done):
    before = files_of(done)
    span_scorer = dataclasses.replace(tiny_world.models(), span_scorer=True)
    for changes, named in (
        ({"models": tiny_world.models(hidden=32)}, r"model\.bert\.hidden_size 32 "),
        ({"models": span_scorer}, "a run with span_scorer "),
        ({"batch_size": 8}, "a run with batch_size "),
        ({"task": "asked"}, "a run with task "),
        ({"seed": 1}, "a run with seed "),
        ({"spans": "all"}, "a run with spans "),
        ({"pairs_task": "asked"}, "a run with pairs_task "),
        ({"reader_batch_size": 3}, "a run with reader_batch_size "),
        ({"score_unmasked": True}, "a run with score_unmasked "),
        ({"mixture": ReaderMixture(0.5, 0.5)}, "a run with mixture"),
        ({"corpus": other_world.corpus}, "a run with corpus_fingerprint "),
        ({"train_steps": 2}, r"TRAIN_STEPS of at least 3, .* got 2"),
    ):
        config = tiny_world.warm_start_config(world, done, **changes)
        with refused(named):
            warm_start.run(config, silent, NEVER)
    config = tiny_world.pretrain_config(world, done)
    with refused("a run with stage 'pretrain'"):
        pretrain.run(config, silent, NEVER)
    assert files_of(done) == before


def test_a_damaged_or_lost_record_costs_no_run(world, done, tmp_path):
    sound = recorded.open_run(str(done))
    model_dir = tmp_path / "model"
    shutil.copytree(done, model_dir)
    (path,) = (model_dir / "settings").iterdir()
    path.write_bytes(path.read_bytes().replace(b'"batch_size": 4', b'"batch_size": 5'))
    config = tiny_world.warm_start_config(world, model_dir, train_steps=4)
    said = []
    attempt = Attempt("warm-start", config, note=said.append)
    with refused("a run with seed 1"):
        warm_start.run(dataclasses.replace(config, seed=1), silent, NEVER)
    with mock.patch.object(warm_start, "WarmStartLoss", quick_loss):
        assert warm_start.run(config, silent, NEVER, attempt)
    (note,) = said
    assert note.startswith(f"expected the record of a run in {path}")
    shutil.rmtree(model_dir / "settings")
    assert recorded.open_run(str(model_dir)).trained == sound.trained
    change_details(model_dir, trained=None)
    with refused("record of the run in .*settings, found none .*; copy that folder"):
        recorded.open_run(str(model_dir))


def without_spans(folder):
    """Makes checkpoints look like those of runs in which every span was an example."""
    as_earlier_version(folder)
    change_details(folder, spans=None)


def test_a_run_with_every_span_goes_on_with_every_span(world, tmp_path, quick_updates):
    quick_updates(warm_start, "WarmStartLoss")
    config = tiny_world.warm_start_config(world, tmp_path, spans="all")
    stop_run(warm_start, config, 2)
    without_spans(tmp_path)
    said = "with spans 'one_per_sentence'.*begun with 'all'; use another MODEL_DIR"
    with refused(said):
        run_to_end(warm_start, world, tmp_path)
    assert warm_start.run(config, silent, NEVER)
    # Questions have no spans that a resumed run must keep.
    order = tiny_world.finetune_config(world, tmp_path).data_order()
    assert "seed" in order
    assert "spans" not in order


def test_a_batch_has_one_span_of_a_sentence_unless_asked_for_all(
    world, corpus, tmp_path
):
    ids = {"query_ids": np.arange(6), "sentence_id": np.array([4, 4, 4, 4, 4, 9])}
    metadata = {"corpus_fingerprint": corpus.fingerprint}
    examples = write_examples(tmp_path / "set", [ids], metadata)
    for spans, kept in (("all", 6), ("one_per_sentence", 2)):
        config = tiny_world.warm_start_config(
            world, tmp_path / spans, batch_size=kept, spans=spans
        )
        stage = Stage(config, KnowledgeEncoder)
        for step in range(4):
            batch = stage.batch(examples, step)
            assert batch.keys() == {"query_ids"}
            rows = sorted(batch["query_ids"])
            assert rows == list(range(6)) if spans == "all" else rows[0] < 5 == rows[1]
        stage.close()


@pytest.mark.parametrize(
    ("stage", "sources", "warned"),
    [
        (pretrain, [], ["retriever", "reader"]),
        (pretrain, ["reader_warm_start"], ["retriever"]),
        (warm_start, ["reader_warm_start"], []),
    ],
)
def test_random_models_are_warned_of_but_in_a_warm_start(
    world, done, tmp_path, caplog, stage, sources, warned
):
    config = CONFIGS[stage](world, tmp_path, **dict.fromkeys(sources, str(done)))
    made = Stage(config, KnowledgeEncoder)
    made.close()
    said = [line for line in caplog.messages if "from random parameters" in line]
    assert [line.split()[1] for line in said] == warned
    before = restore_params(open_store(done)).tree
    for model in ("retriever", "reader"):
        has_source = f"{model}_warm_start" in sources
        assert has_source != bool(differing(made.state.params[model], before[model]))


def test_unknown_examples_or_those_of_another_corpus_are_refused(corpus, other_world):
    for task in ("nothing", ""):
        with refused("realm prepare"):
            open_examples(corpus, task, "train")
    shutil.copytree(
        pathlib.Path(other_world.corpus, "examples/asked"),
        corpus.directory / "examples/foreign",
    )
    with refused("corpus_fingerprint"):
        open_examples(corpus, "foreign", "train")


@pytest.mark.parametrize("stage", [warm_start, pretrain])
def test_sentences_longer_than_a_query_are_refused(world, tmp_path, stage):
    lengths = dataclasses.replace(LENGTHS, query=LENGTHS.query - 1)
    models = dataclasses.replace(tiny_world.models(), lengths=lengths)
    with refused("QUERY_LENGTH of at least 10, .*/examples/.*, got 9; raise it"):
        run_to_end(stage, world, tmp_path, models=models)
    assert not (tmp_path / "index").exists()


def test_a_batch_that_cannot_be_split_is_refused_before_all_else(world, tmp_path):
    batches = {"reader_batch_size": 3, "microbatches": 2}
    config = tiny_world.warm_start_config(world, tmp_path, **batches)
    with refused(r"expected READER_BATCH_SIZE that .* 2 \(MICROBATCHES\) .*, got 3;"):
        warm_start.run(config, silent, NEVER)
    assert [*tmp_path.iterdir()] == []
    # The batch of a model that is not trained is not made.
    reader_alone = {"pairs_task": "", "batch_size": 3, "reader_batch_size": 4}
    for changes in ({"task": ""}, reader_alone):
        Stage(dataclasses.replace(config, **changes), KnowledgeEncoder).close()


@pytest.mark.parametrize("stage", [pretrain, finetune])
def test_a_run_that_would_save_nothing_is_refused(world, tmp_path, stage):
    with refused(r"train_steps to be a whole number of at least 1, got 0"):
        run_to_end(stage, world, tmp_path, train_steps=0)
    assert [*tmp_path.iterdir()] == []


def check_skipping(stage, config):
    """Of eight updates 5 and 7 are bad; at first one may be skipped, then two."""
    config = dataclasses.replace(config, skip_nonfinite_updates=1)
    more = dataclasses.replace(config, skip_nonfinite_updates=2)
    with poisoned(5, 7):
        stop_run(stage, config, 6)
        with refused(r"at most 1 .* number 2 at update 7"):
            stage.run(config, silent, NEVER)
        # It ends with the line of metrics that shows it.
        lines = list(read_metrics(config.model_dir))
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
        assert finished_steps(open_store(config.model_dir)) == [4, 6]
        assert stage.run(more, silent, NEVER)
    lines = list(read_metrics(config.model_dir))
    assert [line["step"] for line in lines if line["skipped_updates"]] == [5, 7]
    assert ["loss" in line for line in lines] == [s not in (5, 7) for s in range(1, 9)]
    assert all(np.isfinite(array).all() for array in arrays_of(config.model_dir))


def test_skipped_updates_count_over_all_starts_of_a_run(world, tmp_path, quick_updates):
    quick_updates(warm_start, "WarmStartLoss")
    config = tiny_world.warm_start_config(
        world, tmp_path, train_steps=8, checkpoint_period=4
    )
    check_skipping(warm_start, config)


@pytest.mark.full
def test_updates_of_realm_may_be_skipped_too(world, tmp_path):
    config = tiny_world.pretrain_config(
        world, tmp_path, refresh_mode="rolling", write_back=True
    )
    check_skipping(pretrain, config)


@pytest.mark.full
@pytest.mark.parametrize("stage", [warm_start, finetune])
def test_the_other_stages_keep_no_nan_either(world, tmp_path, stage):
    with poisoned(3), refused("at update 3;"):
        run_to_end(stage, world, tmp_path, checkpoint_period=1, log_period=100)
    assert finished_steps(open_store(tmp_path)) == [1, 2]
    assert all(np.isfinite(array).all() for array in arrays_of(tmp_path))


def test_parameters_that_begin_as_nan_are_refused_by_name(world, tmp_path, monkeypatch):
    """As a run of an earlier version could leave them."""

    def damaged(params, *others):
        return jax.tree.map(lambda leaf: leaf * np.nan, params)

    monkeypatch.setattr(stage, "starting_params", damaged)
    with refused(r"after 0 updates, got NaN .*params/"):
        run_to_end(pretrain, world, tmp_path)
    assert SnapshotSeries(open_store(tmp_path), RETRIEVER_SERIES).steps() == []
