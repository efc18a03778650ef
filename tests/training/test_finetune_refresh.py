"""Fine-tuning with an index that follows the retriever, and a document tower."""

import threading

import jax
import numpy as np
import pytest

from realm_jax.errors import StoppedError
from realm_jax.index.builder import (
    RETRIEVER_CRC32C,
    TRAINER_ROLE,
    BuilderConfig,
    IndexBuilder,
)
from realm_jax.index.heartbeat import read_heartbeat
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.index.source import IndexSource
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.storage import open_store
from realm_jax.training import finetune
from realm_jax.training.checkpoint_manifests import DEV_EXACT_MATCH, Which, all_details
from realm_jax.training.finetune_loss import FinetuneLoss
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import (
    EMBED,
    LENGTHS,
    NEVER,
    assert_close,
    assert_same_bits,
    differing,
    silent,
)
from tests.training.loss_twins import (
    KEY,
    MAX_SPAN,
    embed,
    finetune_inputs,
    finetune_parts,
    make,
    twin_of_finetune,
)
from tests.training.runs import (
    embeddings_of,
    index_of,
    inputs_of,
    kill_run,
    lines_of,
    opened,
    params_of,
    state_of,
    stop_run,
)
from tests.waiting import PATIENCE

SHARED = tiny_world.models(shared=True)


def config_of(world, folder, **changes):
    """Six updates, a new index every second, the best of two towers' blocks trained."""
    values = {"train_steps": 6, "num_retrieved": 8, "questions": world.questions}
    values |= {"refresh_mode": "blocking", "refresh_period": 2, "num_embedded": 3}
    values |= {"max_questions": 8, "evaluation_period": 2, "checkpoint_period": 4}
    return tiny_world.finetune_config(world, folder, **(values | changes))


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    config = config_of(world, tmp_path_factory.mktemp("refreshed"))
    assert finetune.run(config, silent, NEVER)
    return config


def with_documents(corpus):
    """The first two of three blocks are embedded by the step."""
    inputs = finetune_inputs(corpus)
    ids, segment_ids = corpus.document_ids(np.array([[4, 7], [5, 1]]), LENGTHS.document)
    return inputs.replace(document_ids=ids, document_segment_ids=segment_ids)


@pytest.mark.parametrize("marginalization", list(AnswerMarginalization))
def test_the_document_towers_gradient_is_that_of_the_blocks_it_embeds(
    corpus, marginalization
):
    """By finite differences of the objective in each number of each embedding."""
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    inputs = with_documents(corpus)
    queries, logits = finetune_parts(retriever, reader, params, inputs)
    documents = inputs.document_ids, inputs.document_segment_ids
    blocks = np.asarray(inputs.block_embeddings, np.float64)
    for i, z in np.ndindex(2, 2):
        row = documents[0][i, z], documents[1][i, z]
        blocks[i, z] = embed(retriever, params, "embed_documents", *row)

    def objective(changed):
        losses = twin_of_finetune(queries, changed, logits, inputs, marginalization)
        return sum(loss or 0.0 for of_question in losses for loss in of_question) / 2

    step, slopes = 1e-5, np.zeros((2, 2, blocks.shape[-1]))
    for place in np.ndindex(slopes.shape):
        up, down = blocks.copy(), blocks.copy()
        up[place] += step
        down[place] -= step
        slopes[place] = (objective(up) - objective(down)) / (2 * step)

    def live(tree):
        return retriever.apply({"params": tree}, *documents, method="embed_documents")

    _, pull = jax.vjp(live, params["retriever"])
    (expected,) = pull(slopes.astype(np.float32))
    loss = FinetuneLoss(retriever, reader, marginalization)
    (value, _), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        params, inputs, KEY
    )
    assert float(value) == pytest.approx(objective(blocks), rel=1e-4)
    found = found["retriever"]["document_tower"]
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(found)) > 1e-2
    assert_close(found, expected["document_tower"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["blocking", "rolling"])
def test_the_blocks_that_are_embedded_are_the_best(
    world, corpus, tmp_path, monkeypatch, mode
):
    config = config_of(world, tmp_path, refresh_mode=mode)
    (inputs,) = inputs_of(monkeypatch, finetune, config)
    assert inputs.document_ids.shape == (4, 3, LENGTHS.document)
    every, _ = corpus.document_ids(np.arange(corpus.num_blocks), LENGTHS.document)
    rows = index_of(tmp_path)
    for i, z in np.ndindex(4, 3):
        (block,) = np.flatnonzero((every == inputs.document_ids[i, z]).all(axis=1))
        np.testing.assert_array_equal(rows[block], inputs.block_embeddings[i, z])


def test_every_parameter_trains_and_the_index_follows(corpus, trained):
    first = trained.model_dir
    lines = lines_of(first)
    assert [line["index_step"] for line in lines.values()] == [0, 2, 2, 4, 4, 6]
    assert DEV_EXACT_MATCH in lines[2]
    # What was measured and what is opened had the index of these very parameters.
    model = opened(trained, corpus, Which.LAST)
    assert model.run.step == 6
    embedded = embeddings_of(model.run.tree["retriever"], corpus)
    np.testing.assert_allclose(index_of(first), embedded, rtol=1e-5, atol=1e-6)
    assert read_heartbeat(open_store(first), TRAINER_ROLE).state == "finished"
    before, after = (state_of(first, step)["params"] for step in (4, 6))
    assert any("/document_tower/" in name for name in differing(before, after))


def test_a_checkpoint_is_opened_with_the_index_of_its_own_parameters(
    world, corpus, tmp_path, monkeypatch
):
    """Also where training has not made it: here after 5 updates."""
    config = config_of(world, tmp_path, train_steps=5, models=SHARED, num_embedded=0)
    assert finetune.run(config, silent, NEVER)
    embedded = tiny_world.count_embedded(monkeypatch)
    model = opened(config, corpus, Which.LAST)
    index = model.index(corpus)
    assert sum(embedded) == corpus.num_blocks
    assert index.manifest.step == model.run.step == 5
    retriever = model.source(corpus).retriever(5, model.run.tree["retriever"])
    assert index.manifest.metadata[RETRIEVER_CRC32C] == retriever.params_crc32c()
    # One tower is one model for other software, too.
    assert model.document_encoder(corpus) is model.run.tree["retriever"]
    # An index of other parameters at its step is refused, not searched.
    series = SnapshotSeries(open_store(tmp_path), INDEX_SERIES)
    series.forget(5)
    other = jax.tree.map(lambda leaf: leaf + 1e-3, model.run.tree["retriever"])
    model.source(corpus).build(5, other)
    with refused("other parameters; delete it"):
        model.index(corpus)


@pytest.mark.parametrize("killed_after", [3, pytest.param(5, marks=pytest.mark.full)])
def test_killed_and_resumed_it_is_the_same_run(world, trained, tmp_path, killed_after):
    config = config_of(world, tmp_path)
    kill_run(finetune, config, killed_after)
    assert finetune.run(config, silent, NEVER)
    assert_same_bits(state_of(tmp_path, 6), state_of(trained.model_dir, 6))
    np.testing.assert_array_equal(index_of(tmp_path), index_of(trained.model_dir))
    found, expected = (lines_of(folder) for folder in (tmp_path, trained.model_dir))
    assert found == expected


@pytest.mark.parametrize("step", [6, pytest.param(2, marks=pytest.mark.full)])
def test_stopped_while_it_embeds_it_measures_later_what_was_to_be_measured(
    world, trained, tmp_path, monkeypatch, step
):
    """Behind the last update, and before update 3."""
    config = config_of(world, tmp_path)
    build = IndexSource.build

    def stopped(self, at, *arguments, **options):
        if at == step:
            raise StoppedError("stopped")
        return build(self, at, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(IndexSource, "build", stopped)
        finetune.run(config, silent, NEVER)
    before = max(all_details(open_store(tmp_path)).items())
    assert before[0] == step
    assert DEV_EXACT_MATCH not in before[1]
    assert finetune.run(config, silent, NEVER)
    assert_same_bits(state_of(tmp_path, 6), state_of(trained.model_dir, 6))
    found, expected = (
        {at: details[DEV_EXACT_MATCH] for at, details in all_details(store).items()}
        for store in map(open_store, (tmp_path, trained.model_dir))
    )
    assert found.items() <= expected.items()
    assert 6 in found


def test_rolling_renews_every_row_within_a_period(world, corpus, tmp_path):
    """With a period of one update, by the parameters before it."""
    changes = {"refresh_mode": "rolling", "refresh_period": 1, "train_steps": 3}
    config = config_of(world, tmp_path, **changes)
    stop_run(finetune, config, 2)
    before = params_of(tmp_path)["retriever"]
    assert finetune.run(config, silent, NEVER)
    rows = state_of(tmp_path, 3, "index")["index"]["rows"][: corpus.num_blocks]
    np.testing.assert_allclose(rows, embeddings_of(before, corpus), atol=1e-5)
    # Whoever opens it searches an index of its own parameters.
    embedded = embeddings_of(params_of(tmp_path)["retriever"], corpus)
    assert np.abs(rows - embedded).max() > 1e-3
    opened(config, corpus, Which.LAST).index(corpus)
    np.testing.assert_allclose(index_of(tmp_path), embedded, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_rolling_goes_on_from_the_very_rows(world, tmp_path):
    whole, parted = (
        config_of(world, tmp_path / name, refresh_mode="rolling", refresh_period=3)
        for name in ("whole", "parted")
    )
    assert finetune.run(whole, silent, NEVER)
    kill_run(finetune, parted, 5)
    assert finetune.run(parted, silent, NEVER)
    folders = whole.model_dir, parted.model_dir
    assert_same_bits(*(state_of(folder, 6, "index") for folder in folders))
    lines, others = map(lines_of, folders)
    assert lines == others
    ages = [line["index_age_steps"] for line in lines.values()]
    assert ages == [1, 2, 3, 3, 3, 3]


@pytest.mark.full
def test_async_ends_with_the_index_that_a_builder_beside_it_makes(
    world, corpus, tmp_path
):
    store = open_store(tmp_path)
    config = config_of(world, tmp_path, refresh_mode="async", train_steps=3)
    building = BuilderConfig(embed=EMBED, poll_seconds=0.02)
    builder = IndexBuilder(store, corpus, building)
    thread = threading.Thread(target=builder.run, args=(NEVER,), daemon=True)
    thread.start()
    assert finetune.run(config, silent, NEVER)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert SnapshotSeries(store, INDEX_SERIES).latest_step() == 3
    embedded = embeddings_of(params_of(tmp_path)["retriever"], corpus)
    np.testing.assert_allclose(index_of(tmp_path), embedded, rtol=1e-5, atol=1e-6)


def test_a_frozen_run_does_not_go_on_refreshed_nor_the_other_way_round(world, tmp_path):
    """What differs in the order of a run is refused by name, in any stage."""
    frozen = tiny_world.finetune_config(world, tmp_path, models=SHARED)
    refreshed = config_of(world, tmp_path, models=SHARED, num_embedded=0)
    orders = [config.data_order() for config in (frozen, refreshed)]
    assert [order.pop("refreshes_index") for order in orders] == [None, True]
    assert orders[0] == orders[1]


def test_settings_that_do_not_go_together_are_refused(world):
    for changes, words in (
        ({"refresh_mode": "never"}, "REFRESH_MODE to be one of off, blocking, async"),
        ({"refresh_mode": "off"}, '"blocking", "async" or "rolling" with NUM_EMBEDDED'),
        ({"refresh_mode": "rolling", "searcher": "scann"}, 'SEARCHER="device"'),
        ({"num_embedded": 0}, "NUM_EMBEDDED above 0, or one shared tower"),
        ({"frozen": ("retriever",)}, r"in FROZEN, got 3 and FROZEN=\['retriever'\]"),
        ({"num_embedded": 9}, r"NUM_EMBEDDED of at most 8 \(NUM_RETRIEVED\), got 9"),
        ({"num_read": 9}, "num_read"),
        ({"train_num_read": 9}, "num_read"),
        ({"early_stopping": 2, "questions": ""}, "got none with EARLY_STOPPING=2"),
        ({"more_tasks": {"questions": 0.5}}, "other tasks than TASK in MORE_TASKS"),
        ({"more_tasks": {"others": 1.0}}, "each at least a thousandth"),
    ):
        with refused(words):
            config_of(world, "nowhere", **changes)
