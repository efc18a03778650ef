"""The library gives what `realm ask` gives, of the parameters that were trained."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

import realm_jax
from realm_jax import storage
from realm_jax.answering.hybrid import BM25Index, fuse
from realm_jax.answering.reader import Answerer
from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.ask import AnswerService, AskConfig
from realm_jax.evaluation.recorded import answering_config, find_model
from realm_jax.index import searchers
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.models.retriever import Retriever
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.training import finetune, initialization, warm_start
from realm_jax.training.checkpoints import restore_params
from tests import tiny_world as tiny
from tests.index.tiny_builder import one_by_one
from tests.records import as_earlier_version, change_details, change_record
from tests.refused import refused

NUM_READ = 4
WEIGHT = 2.0
MAX_SPAN = 3


pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """The configuration of a fine-tuned model, whose directory is all `load` gets."""
    config = tiny.finetune_config(
        world,
        tmp_path_factory.mktemp("model"),
        num_read=NUM_READ,
        max_span=MAX_SPAN,
        retrieval_weight=WEIGHT,
    )
    assert finetune.run(config, tiny.silent, tiny.NEVER)
    return config


@pytest.fixture(scope="module")
def model(trained):
    return realm_jax.load(trained.model_dir)


@pytest.fixture(scope="module")
def questions(world):
    lines = pathlib.Path(world.questions).read_text().splitlines()
    return [json.loads(line)["question"] for line in lines][:11]


def test_the_configuration_is_that_of_the_gin_files(trained, world):
    run = find_model(trained.model_dir)
    recorded = answering_config(run)
    vocab_size = BlockStore.open(world.corpus).vocabulary.size
    towers = [c.models.retriever_config(vocab_size) for c in (recorded, trained)]
    assert len({json.dumps(initialization.describe(tower)) for tower in towers}) == 1
    assert recorded.models.lengths == trained.models.lengths
    for name in ("marginalization", "span_layer_norm_epsilon", "retrieval_weight"):
        assert getattr(recorded, name) == getattr(trained, name)
    assert (recorded.num_read, recorded.max_span) == (NUM_READ, MAX_SPAN)
    assert run.trained.corpus == world.corpus


def test_every_setting_of_the_towers_comes_back():
    """Those of training alone may be lost; `temperature` is recorded if it is set."""
    lengths = initialization.Lengths(5, 6, 7)
    for changes in ({"temperature": 3.0}, {"pooling": "mean"}, {"shared": False}):
        config = tiny.models().retriever_config(50)
        config = type(config)(config.bert, **({"projection_size": 4} | changes))
        described = json.loads(json.dumps(initialization.describe(config)))
        models = initialization.described_models(described, lengths, dtype="bfloat16")
        back = models.retriever_config(50)
        assert initialization.describe(back) == initialization.describe(config)
        assert back.temperature == changes.get("temperature", 1.0)
        assert back.bert.dtype == "bfloat16"
        assert models.lengths == lengths


def slow_embeddings(trained, world, texts):
    """Queries by the fine-tuned tower, one at a time, and the index's own rows."""
    store = BlockStore.open(world.corpus)
    config = trained.models.retriever_config(store.vocabulary.size)
    restored = restore_params(storage.open_store(trained.model_dir))
    embed = jax.jit(
        lambda params, ids: Retriever(config).apply(
            {"params": params}, ids, method=Retriever.embed_queries
        )
    )
    queries, vocabulary = [], store.vocabulary
    for text in texts:
        pieces = vocabulary.encode(text).ids[: tiny.LENGTHS.query - 2]
        row = [vocabulary.cls, *pieces, vocabulary.sep]
        ids = np.pad(row, (0, tiny.LENGTHS.query - len(row)))[None].astype(np.int32)
        queries.append(np.asarray(embed(restored.tree["retriever"], ids))[0])
    series = SnapshotSeries(storage.open_store(trained.model_dir), INDEX_SERIES)
    (step,) = series.steps()
    rows = series.read_array(series.read_manifest(step), "embeddings")
    return store, restored.tree, np.stack(queries), np.asarray(rows)


def test_answers_are_those_of_the_trained_model_and_of_realm_ask(
    model, trained, world, questions
):
    store, params, _, rows = slow_embeddings(trained, world, questions)
    retriever = trained.models.retriever_config(store.vocabulary.size)
    answerer = Answerer(
        retriever=retriever,
        reader=trained.make_reader(retriever.bert),
        params=params,
        corpus=store,
        searcher=searchers.make_searcher("device", rows),
        lengths=tiny.LENGTHS,
        num_read=NUM_READ,
        marginalization=AnswerMarginalization.PRODUCT,
        retrieval_weight=WEIGHT,
        batch_size=1,
    )
    service = AnswerService(
        AskConfig(world.corpus, trained, embed=tiny.EMBED), tiny.NEVER
    )
    for question in questions:
        answer, (expected,) = model.answer(question), answerer.answer([question])
        asked = service.answer(question).answer
        assert answer.text == expected.text == asked.text
        assert answer.probability == pytest.approx(expected.probability, rel=1e-6)
        assert asked.probability == pytest.approx(expected.probability, rel=1e-6)
        assert len(answer.documents) == NUM_READ
        for document, other in zip(answer.documents, expected.documents, strict=True):
            for name in ("block_id", "title", "source_id", "text", "places"):
                assert getattr(document, name) == getattr(other, name)
            for name in ("score", "probability", "answer_probability"):
                value = getattr(document, name)
                assert value == pytest.approx(getattr(other, name), rel=1e-5)


def require_found_by_a_sort(found, queries, rows):
    for documents, query in zip(found, queries, strict=True):
        scores = rows @ query
        got = [document.score for document in documents]
        expected = np.sort(scores)[::-1][: len(documents)]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        blocks = [document.block_id for document in documents]
        np.testing.assert_allclose(got, scores[blocks], rtol=1e-4, atol=1e-5)


def test_searches_and_embeddings_equal_a_sort(model, trained, world, questions):
    store, _, queries, rows = slow_embeddings(trained, world, questions)
    embeddings = model.embed(questions)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, queries, rtol=1e-4, atol=1e-5)
    found = model.search(questions, k=store.num_blocks)
    require_found_by_a_sort(found, queries, rows)
    for documents in found:
        assert sorted(d.block_id for d in documents) == list(range(store.num_blocks))
        for document in documents:
            assert document.text == store.text(document.block_id).body


def test_a_hybrid_search_fuses_it_with_bm25(model, questions):
    count = model.corpus.num_blocks
    retrieved = [[d.block_id for d in one] for one in model.search(questions, k=count)]
    by_words = BM25Index(model.corpus).search(questions, count).ids
    expected = fuse(np.array(retrieved), by_words, 3)
    found = model.search(questions, k=3, hybrid=True)
    assert [[d.block_id for d in one] for one in found] == expected.ids.tolist()
    scores = [[d.score for d in one] for one in found]
    np.testing.assert_allclose(scores, expected.scores, rtol=1e-6)


def test_a_hybrid_answer_is_read_from_the_highest_sums(model, questions):
    count = model.corpus.num_blocks
    by_words = np.maximum(BM25Index(model.corpus).scores(questions), 0.0)
    found = model.search(questions, k=count)
    answers = model.answer(questions, hybrid=True)
    for documents, lexical, answer in zip(found, by_words, answers, strict=True):
        scores = np.empty(count)
        scores[[d.block_id for d in documents]] = [d.score for d in documents]
        scores += scores.std() * lexical / lexical.max()
        best = np.argsort(-scores)[: model.num_read]
        assert [d.block_id for d in answer.documents] == best.tolist()
        got = [d.score for d in answer.documents]
        np.testing.assert_allclose(got, scores[best], rtol=1e-4, atol=1e-5)


def test_a_batch_is_its_questions_one_by_one(model, questions):
    together = model.answer(questions)
    for answer, question in zip(together, questions, strict=True):
        alone = model.answer(f" {question}\n")
        assert alone.text == answer.text
        assert alone.question == answer.question == question
        assert alone.probability == pytest.approx(answer.probability, rel=1e-5)
    one, *_ = model.search(questions[:3], k=3)
    alone = model.search(questions[0], k=3)
    assert [d.block_id for d in one] == [d.block_id for d in alone]
    (single,) = model.embed(questions[:1])
    assert single.shape == (8,)
    np.testing.assert_array_equal(model.embed(questions[0]), single)


def test_any_iterable_is_a_batch(model, questions):
    found = model.answer((question for question in questions[:2]), k=1)
    assert [answer.question for answer in found] == questions[:2]
    assert model.answer([]) == []
    assert model.search([]) == []
    assert model.embed([]).shape == (0, 8)


def test_k_shows_fewer_documents_of_the_same_answer(model, questions):
    every, two = model.answer(questions[0]), model.answer(questions[0], k=2)
    assert two.documents == every.documents[:2]
    assert (two.text, two.probability) == (every.text, every.probability)


def test_a_corpus_may_be_given_open_and_settings_replaced(trained, world, questions):
    corpus = realm_jax.open_corpus(world.corpus)
    model = realm_jax.load(trained.model_dir, corpus, num_read=2, searcher="scann")
    assert model.corpus is corpus
    assert len(model.answer(questions[0]).documents) == 2
    expected = realm_jax.load(trained.model_dir, num_read=2).answer(questions[0])
    assert model.answer(questions[0]).text == expected.text


def test_what_is_no_question_or_number_of_documents_is_named(model):
    for method in ("answer", "search", "embed"):
        for question in ("", "  ", None, 3, b"who"):
            for asked in (question, ["who", question]):
                with refused("question"):
                    getattr(model, method)(asked)
    for method, most in (("answer", NUM_READ), ("search", model.corpus.num_blocks)):
        for k in (0, -1, 1.5, 10_000):
            with refused(f"1 to {most}"):
                getattr(model, method)("who", k=k)


def test_bad_places_and_settings(trained, world, tmp_path):
    with refused("nowhere"):
        realm_jax.load(tmp_path / "nowhere", world.corpus)
    assert not (tmp_path / "nowhere").exists()
    with refused("no_corpus"):
        realm_jax.open_corpus(tmp_path / "no_corpus")
    other = tiny.make(tmp_path, tiny.WorldConfig(12, 6, 20, 12, seed=1))
    for named, given in (
        ("no_corpus", {"corpus": tmp_path / "no_corpus"}),
        ("fingerprint", {"corpus": other.corpus}),
        ("num_read", {"num_read": 0}),
        ("batch_size", {"batch_size": 0}),
        ("sieve", {"searcher": "sieve"}),
        ("CHECKPOINT", {"checkpoint": "first"}),
    ):
        with refused(named):
            realm_jax.load(trained.model_dir, **given)


def changed(trained, folder, **new):
    """Copies the model, which has recorded something else."""
    shutil.copytree(trained.model_dir, folder)
    change_record(folder, **new)
    return folder


def test_a_checkpoint_of_before_says_what_to_give(trained, world, tmp_path, questions):
    old = changed(trained, tmp_path / "old")
    as_earlier_version(old)
    shutil.rmtree(old / "settings")
    change_details(old, answering=None)
    with refused("corpus="):
        realm_jax.load(old)
    with refused("num_read="):
        realm_jax.load(old, world.corpus)
    model = realm_jax.load(old, world.corpus, num_read=NUM_READ)
    expected = realm_jax.load(trained.model_dir, retrieval_weight=1.0)
    assert model.answer(questions[0]) == expected.answer(questions[0])


def test_a_corpus_that_was_moved_is_asked_for(trained, world, tmp_path, questions):
    moved = changed(trained, tmp_path / "moved", corpus=str(tmp_path / "before"))
    with refused("before.* now, give corpus="):
        realm_jax.load(moved)
    model = realm_jax.load(moved, world.corpus)
    assert model.answer(questions[0]).documents


def test_a_model_of_another_version_is_refused(trained, tmp_path):
    heads = {"bert": {"heads": 2, "num_heads": None}}
    with refused("heads"):
        realm_jax.load(changed(trained, tmp_path / "other", model=heads))


def test_a_retriever_without_a_reader_searches_and_embeds(
    world, questions, tmp_path, monkeypatch
):
    config = tiny.warm_start_config(world, tmp_path / "my_warm_start")
    assert warm_start.run(config, tiny.silent, tiny.NEVER)
    embedded = tiny.count_embedded(monkeypatch)
    realm_jax.load(config.model_dir, world.corpus)
    model = realm_jax.load(tmp_path, world.corpus)
    # It had no index: one was made, and kept.
    assert embedded == [model.corpus.num_blocks]
    store, params, queries, _ = slow_embeddings(config, world, questions[:3])
    rows = one_by_one(
        config.models.retriever_config(store.vocabulary.size),
        params["retriever"],
        store,
        range(store.num_blocks),
        tiny.LENGTHS.document,
    )
    np.testing.assert_allclose(model.embed(questions[:3]), queries, atol=1e-5)
    found = model.search(questions[:3], 4)
    assert [len(documents) for documents in found] == [4, 4, 4]
    require_found_by_a_sort(found, queries, rows)
    with refused("fine-tune it"):
        model.answer(questions[0])
    with refused("held_out_utility"):
        realm_jax.load(config.model_dir, world.corpus, checkpoint="best")


def test_another_searcher_answers(model, questions):
    rows = np.ones((model.corpus.num_blocks, 8), np.float32)
    alike = model.with_searcher(searchers.make_searcher("device", rows))
    answer = alike.answer(questions[0])
    # All blocks score alike, so the first ones are found, with the same probability.
    assert [d.block_id for d in answer.documents] == list(range(NUM_READ))
    for document in answer.documents:
        assert document.probability == pytest.approx(1 / NUM_READ)
    with refused(str(model.corpus.num_blocks)):
        model.with_searcher(searchers.make_searcher("device", rows[1:]))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="lode"):
        _ = realm_jax.lode  # pyright: ignore[reportAttributeAccessIssue]
