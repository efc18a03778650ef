import dataclasses
import functools
import json
import logging
import pathlib

import flax.traverse_util
import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader
from realm_jax.storage import open_store
from realm_jax.training.checkpoints import Checkpointer
from realm_jax.training.initialization import (
    describe,
    initial_params,
    warm_start_params,
)
from realm_jax.training.state import create_state
from realm_jax.types import Lengths
from realm_jax.weights.bert import save_bert, save_config, save_masked_lm
from tests import tiny_world
from tests.records import details_of
from tests.refused import refused
from tests.tiny_world import LENGTHS, assert_close, assert_same_bits, differing

VOCABULARY = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(35))])
OTHER_WORDS = WordPiece([*SPECIAL_PIECES, *(f"v{i}" for i in range(35))])
VOCAB = VOCABULARY.size


def started(params, source, config, vocabulary=VOCABULARY, **sources):
    return warm_start_params(params, source, config, vocabulary, **sources)


@functools.cache
def draw(seed=0, reader_class=KnowledgeEncoder):
    config = tiny_world.models().retriever_config(VOCAB)
    models = Retriever(config), reader_class(config.bert)
    return initial_params(*models, LENGTHS, seed)[0], config


@functools.cache
def shapes(**sizes):
    """Parameters of other sizes, all zero: nothing is compiled for them."""
    config = tiny_world.models(**sizes).retriever_config(VOCAB)
    models = Retriever(config), KnowledgeEncoder(config.bert)
    traced = jax.eval_shape(lambda: initial_params(*models, LENGTHS, 0)[0])
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), traced), config


def test_a_reader_without_room_behind_a_query_is_refused():
    for joined in (95, 96):
        with refused(rf"JOINED_LENGTH above QUERY_LENGTH \(96\), got {joined}; raise"):
            Lengths(query=96, joined=joined)
    assert Lengths(query=96, joined=97).joined == 97


def test_layers_are_drawn_alike_whatever_the_scan_unrolls():
    config = tiny_world.models().retriever_config(VOCAB)
    reader = KnowledgeEncoder(
        dataclasses.replace(config.bert, num_layers=2, scan_unroll=2)
    )
    drawn, _ = initial_params(Retriever(config), reader, LENGTHS, 3)
    # By Flax alone, from the model as it is.
    _, key = jax.random.split(jax.random.key(3))
    ids = np.zeros((1, 1, LENGTHS.joined), np.int32)
    expected = jax.jit(reader.init)(key, ids, ids, ids[..., :1])["params"]
    assert_close(drawn["reader"], expected, rtol=1e-4, atol=1e-7)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Model directory of an earlier stage, and its parameters."""
    folder = tmp_path_factory.mktemp("earlier")
    params, config = draw(1)
    checkpointer = Checkpointer(open_store(folder))
    vocabulary = VOCABULARY.fingerprint
    details = details_of(model=describe(config), vocabulary_fingerprint=vocabulary)
    checkpointer.save(create_state(params, optax.sgd(0.1), seed=1), details)
    checkpointer.close()
    return str(folder), params


def save_published(folder, params, config, *, with_head=False):
    """Writes the reader's encoder as MiniLM comes: model.safetensors, config.json."""
    path, reader = folder / "model.safetensors", params["reader"]
    if with_head:
        save_masked_lm(path, reader, config.bert)
    else:
        save_bert(path, reader["bert"], config.bert)
    save_config(folder, config.bert)


def test_parameters_are_a_function_of_the_seed():
    (one, config), (other, _) = draw(0), draw(1)
    assert_same_bits(one, draw.__wrapped__(0)[0])
    changed = differing(one, other)
    assert "retriever/query_tower/bert/token_embedding/embedding" in changed
    towers = one["retriever"]
    assert differing(towers["query_tower"], towers["document_tower"])
    # With no source they stay as drawn.
    assert_same_bits(started(one, "", config), one)


def test_every_parameter_has_its_axes():
    config = tiny_world.models().retriever_config(VOCAB)
    models = Retriever(config), SpanReader(config.bert)
    params, axes = initial_params(*models, LENGTHS, seed=0)
    named = {
        "/".join(path).removesuffix("_axes"): value.names
        for path, value in flax.traverse_util.flatten_dict(axes).items()
    }
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    assert named.keys() == flat.keys()
    for name, leaf in flat.items():
        assert len(named[name]) == leaf.ndim
        assert (named[name][0] == "layer") == ("/layers/" in name)


def test_an_earlier_stage_is_taken_over_where_both_have_it(earlier):
    folder, before = earlier
    drawn, config = draw(2, SpanReader)
    params = started(drawn, folder, config)
    assert_same_bits(params["retriever"], before["retriever"])
    assert_same_bits(params["reader"]["bert"], before["reader"]["bert"])
    heads = {name for name in params["reader"] if name != "bert"}
    assert heads == {"span_dense", "span_norm", "span_output"}
    for head in heads:
        assert_same_bits(params["reader"][head], drawn["reader"][head])
    # The same reader has the same head.
    assert_same_bits(started(draw(2)[0], folder, config), before)


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("reader_class", [KnowledgeEncoder, SpanReader])
def test_published_weights_go_into_both_towers_and_the_reader(
    tmp_path, caplog, reader_class, with_head
):
    published, config = draw(3)
    save_published(tmp_path, published, config, with_head=with_head)
    drawn, _ = draw(4, reader_class)
    with caplog.at_level(logging.INFO):
        params = started(drawn, str(tmp_path), config)
    for place in (*params["retriever"].values(), params["reader"]):
        assert_same_bits(place["bert"], published["reader"]["bert"])
    if reader_class is KnowledgeEncoder and with_head:
        assert_same_bits(params["reader"], published["reader"])
    else:
        # A head that was not published, or of questions, stays as drawn.
        assert all("/bert/" in name for name in differing(params, drawn))
    missed = reader_class is KnowledgeEncoder and not with_head
    assert caplog.text.count("no masked-LM head") == missed


def test_a_masked_lm_without_a_pooler_will_do_where_nothing_reads_one(tmp_path):
    published, config = draw(3)
    save_published(tmp_path, published, config, with_head=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensors[name] for name in tensors if "pooler" not in name}, path)
    mean = dataclasses.replace(config, pooling="mean")
    for reader_class in (KnowledgeEncoder, SpanReader):
        drawn, _ = draw(4, reader_class)
        of_reader = started(drawn, "", config, reader_source=str(tmp_path))
        of_both = started(drawn, str(tmp_path), mean)
        for params in (of_reader, of_both):
            found, encoder = params["reader"]["bert"], published["reader"]["bert"]
            assert_same_bits(found["layers"], encoder["layers"])
            assert not any(map(np.any, jax.tree.leaves(found["pooler"])))
        with refused(r"pooler\.dense\.weight is missing"):
            started(drawn, str(tmp_path), config)


def test_a_stage_of_another_model_or_vocabulary_is_refused_by_name(earlier):
    folder, _ = earlier
    drawn, config = draw(2)
    one_head = dataclasses.replace(config.bert, num_heads=1)
    mean = dataclasses.replace(config, pooling="mean")
    other_heads = dataclasses.replace(config, bert=one_head)
    for (params, other), named in (
        (shapes(hidden=32), r"of shape \(.*32.*\) in .*, got \(.*16.*\)"),
        (shapes(shared=True), r"expected retriever/tower/.*, got None"),
        # Of the same shapes, and another meaning.
        ((drawn, mean), "expected the model .*'pooling': "),
        ((drawn, other_heads), "expected the model .*'num_heads': "),
    ):
        with refused(named):
            started(params, folder, other)
    with refused("VOCABULARY"):
        started(drawn, folder, config, OTHER_WORDS)


def test_published_weights_of_other_shapes_or_another_tokenizer_are_refused(tmp_path):
    published, config = draw(3)
    save_published(tmp_path, published, config)
    larger = shapes(hidden=32)
    with refused("1 layers of 32"):
        started(larger[0], str(tmp_path), larger[1])
    VOCABULARY.save(tmp_path / "vocab.txt")
    params, _ = shapes()
    started(params, str(tmp_path), config)
    with refused("VOCABULARY"):
        started(params, str(tmp_path), config, OTHER_WORDS)
    for settings in (
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"tokenize_chinese_chars": False},
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        same = load_vocabulary(tmp_path / "vocab.txt")
        assert same.fingerprint != VOCABULARY.fingerprint
        started(params, str(tmp_path), config, same)
        with refused(r"=False as in .*tokenizer_config\.js"):
            started(params, str(tmp_path), config)


@pytest.fixture
def sources(earlier, tmp_path):
    """An earlier stage and published weights: source -> its parameters."""
    stage, before = earlier
    published, config = draw(3)
    save_published(tmp_path, published, config, with_head=True)
    return {stage: before, str(tmp_path): published}


def test_each_model_may_come_from_a_source_of_its_own(sources):
    drawn, config = draw(4)
    for own in sources:
        (other,) = sources.keys() - {own}
        for model, rest in (("retriever", "reader"), ("reader", "retriever")):
            source = {f"{model}_source": own}
            params = started(drawn, other, config, **source)
            assert_same_bits(params[model], started(drawn, own, config)[model])
            assert_same_bits(params[rest], started(drawn, other, config)[rest])
            params = started(drawn, "", config, **source)
            assert differing(params[model], drawn[model])
            assert_same_bits(params[rest], drawn[rest])
    stage, folder = sources
    both = {"retriever_source": stage, "reader_source": folder}
    params = started(drawn, "nowhere", config, **both)
    assert_same_bits(params["retriever"], sources[stage]["retriever"])
    assert_same_bits(params["reader"], sources[folder]["reader"])


def test_a_reader_may_come_from_a_stage_with_other_towers(earlier):
    folder, before = earlier
    drawn, config = draw(4)
    config = dataclasses.replace(config, pooling="mean")
    params = started(drawn, "", config, reader_source=folder)
    assert_same_bits(params["reader"], before["reader"])
    with refused(r"^RETRIEVER_WARM_START of retriever: "):
        started(drawn, "", config, retriever_source=folder)


def test_a_source_is_refused_with_its_macro_and_models(sources, tmp_path):
    (drawn, config), (larger, larger_config) = draw(4), shapes(hidden=32)
    stage, folder = sources
    OTHER_WORDS.save(pathlib.Path(folder) / "vocab.txt")
    missing = tmp_path / "missing"
    for model in ("retriever", "reader"):
        named = f"^{model.upper()}_WARM_START of {model}: "
        for source in sources:
            wrong = {f"{model}_source": source}
            with refused(named + ".*32"):
                started(larger, "", larger_config, **wrong)
        with refused(named + ".*VOCABULARY"):
            started(drawn, stage, config, **wrong)
        with refused(named + ".*found neither"):
            started(drawn, stage, config, **{f"{model}_source": str(missing)})
    with refused("^WARM_START of retriever and reader: .*found neither"):
        started(drawn, str(missing), config)
    assert not missing.exists()


def test_the_description_tells_models_apart_and_is_json():
    one, other = (
        describe(tiny_world.models(hidden=size).retriever_config(VOCAB))
        for size in (16, 32)
    )
    free = tiny_world.models().retriever_config(VOCAB)
    bert = dataclasses.replace(free.bert, dtype="bfloat16", remat="full")
    free = dataclasses.replace(free, bert=bert, projection_dropout=0.5)
    assert describe(free) == one == json.loads(json.dumps(one))
    assert one != other
    assert (one["bert"]["hidden_size"], one["shared"]) == (16, False)
