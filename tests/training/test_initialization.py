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
import safetensors.numpy

from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import BadInputError
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
from realm_jax.weights.bert import save_bert, save_masked_lm
from tests import tiny_world
from tests.tiny_world import LENGTHS, assert_same_bits, differing

VOCABULARY = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(35))])
VOCAB = VOCABULARY.size


def draw(seed=0, reader_class=KnowledgeEncoder):
    config = tiny_world.models().retriever_config(VOCAB)
    params, _ = initial_params(
        Retriever(config), reader_class(config.bert), LENGTHS, seed
    )
    return params, config


def shapes(**sizes):
    """Parameters of other sizes, all zero: nothing is compiled for them."""
    config = tiny_world.models(**sizes).retriever_config(VOCAB)
    models = Retriever(config), KnowledgeEncoder(config.bert)
    traced = jax.eval_shape(lambda: initial_params(*models, LENGTHS, 0)[0])
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), traced), config


def test_layers_are_drawn_alike_whatever_the_scan_unrolls():
    config = tiny_world.models().retriever_config(VOCAB)
    bert = dataclasses.replace(config.bert, num_layers=3, scan_unroll=3)
    retriever = Retriever(dataclasses.replace(config, bert=bert))
    reader = KnowledgeEncoder(bert)
    drawn, _ = initial_params(retriever, reader, LENGTHS, 3)
    # By Flax alone, from the models as they are.
    keys = jax.random.split(jax.random.key(3))
    ids = np.zeros((1, 1, LENGTHS.joined), np.int32)
    expected = {
        "retriever": retriever.init(keys[0], ids[0], ids, ids)["params"],
        "reader": reader.init(keys[1], ids, ids, ids[..., :1])["params"],
    }
    # Compiled, the truncated normal is rounded differently.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    jax.tree.map(close, drawn, expected)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Model directory of an earlier stage, and its parameters."""
    folder = tmp_path_factory.mktemp("earlier")
    params, config = draw(seed=1)
    checkpointer = Checkpointer(open_store(folder))
    state = create_state(params, optax.sgd(0.1), seed=1)
    state = state.replace(step=jax.numpy.asarray(5))
    details = {
        "model": describe(config),
        "vocabulary_fingerprint": VOCABULARY.fingerprint,
    }
    checkpointer.save(state, details)
    checkpointer.close()
    return str(folder), params


def save_published(folder, params, config, *, with_head=False):
    """Writes the reader's encoder as MiniLM comes: model.safetensors, config.json."""
    bert = config.bert
    path = folder / "model.safetensors"
    if with_head:
        save_masked_lm(path, params["reader"], bert)
    else:
        save_bert(path, params["reader"]["bert"], bert)
    described = {
        "vocab_size": bert.vocab_size,
        "hidden_size": bert.hidden_size,
        "num_hidden_layers": bert.num_layers,
        "num_attention_heads": bert.num_heads,
        "intermediate_size": bert.mlp_size,
        "max_position_embeddings": bert.max_positions,
        "type_vocab_size": bert.num_segments,
        "hidden_act": "gelu_new",
        "layer_norm_eps": bert.layer_norm_epsilon,
    }
    (folder / "config.json").write_text(json.dumps(described))


def test_parameters_are_a_function_of_the_seed():
    one, again, other = (draw(seed)[0] for seed in (0, 0, 1))
    assert_same_bits(one, again)
    assert "retriever/query_tower/bert/token_embedding/embedding" in differing(
        one, other
    )
    towers = one["retriever"]
    assert differing(towers["query_tower"], towers["document_tower"])


def test_every_parameter_has_its_axes():
    config = tiny_world.models().retriever_config(VOCAB)
    params, axes = initial_params(
        Retriever(config), SpanReader(config.bert), LENGTHS, seed=0
    )
    named = {
        "/".join(path).removesuffix("_axes"): names
        for path, names in flax.traverse_util.flatten_dict(axes).items()
    }
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    assert named.keys() == flat.keys()
    assert all(len(named[name].names) == flat[name].ndim for name in flat)


def test_from_nothing_they_stay_as_drawn():
    params, config = draw()
    assert_same_bits(warm_start_params(params, "", config, VOCABULARY), params)


def test_an_earlier_stage_is_taken_over_where_both_have_it(earlier):
    folder, before = earlier
    drawn, config = draw(seed=2, reader_class=SpanReader)
    params = warm_start_params(drawn, folder, config, VOCABULARY)
    assert_same_bits(params["retriever"], before["retriever"])
    assert_same_bits(params["reader"]["bert"], before["reader"]["bert"])
    heads = {name for name in params["reader"] if name != "bert"}
    assert heads == {"span_dense", "span_norm", "span_output"}
    for head in heads:
        assert_same_bits(params["reader"][head], drawn["reader"][head])


def test_the_head_of_the_same_reader_is_taken_over_too(earlier):
    folder, before = earlier
    drawn, config = draw(seed=2)
    assert_same_bits(warm_start_params(drawn, folder, config, VOCABULARY), before)


def test_published_weights_go_into_both_towers_and_the_reader(tmp_path):
    published, config = draw(seed=3)
    save_published(tmp_path, published, config)
    drawn, _ = draw(seed=4)
    params = warm_start_params(drawn, str(tmp_path), config, VOCABULARY)
    encoder = published["reader"]["bert"]
    for place in (
        params["retriever"]["query_tower"],
        params["retriever"]["document_tower"],
        params["reader"],
    ):
        assert_same_bits(place["bert"], encoder)
    changed = differing(params, drawn)
    assert changed
    assert all("/bert/" in name for name in changed)


def test_a_published_head_goes_into_the_reader_that_has_one(tmp_path, caplog):
    published, config = draw(seed=3)
    save_published(tmp_path, published, config, with_head=True)
    drawn, _ = draw(seed=4)
    with caplog.at_level(logging.INFO):
        params = warm_start_params(drawn, str(tmp_path), config, VOCABULARY)
    assert_same_bits(params["reader"], published["reader"])
    assert "masked-LM head" not in caplog.text
    drawn, _ = draw(seed=4, reader_class=SpanReader)
    params = warm_start_params(drawn, str(tmp_path), config, VOCABULARY)
    assert_same_bits(params["reader"]["bert"], published["reader"]["bert"])
    assert_same_bits(params["reader"]["span_dense"], drawn["reader"]["span_dense"])


@pytest.mark.parametrize("reader_class", [KnowledgeEncoder, SpanReader])
def test_a_masked_lm_without_a_pooler_will_do_where_nothing_reads_one(
    tmp_path, reader_class
):
    published, config = draw(seed=3)
    save_published(tmp_path, published, config, with_head=True)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(
        {name: tensor for name, tensor in tensors.items() if "pooler" not in name}, path
    )
    drawn, _ = draw(seed=4, reader_class=reader_class)
    of_reader = warm_start_params(
        drawn, "", config, VOCABULARY, reader_source=str(tmp_path)
    )
    mean = dataclasses.replace(config, pooling="mean")
    of_both = warm_start_params(drawn, str(tmp_path), mean, VOCABULARY)
    for params in (of_reader, of_both):
        found, encoder = params["reader"]["bert"], published["reader"]["bert"]
        assert_same_bits(found["layers"], encoder["layers"])
        assert_same_bits(found["pooler"], drawn["reader"]["bert"]["pooler"])
    cls = dataclasses.replace(config, pooling="cls")
    with pytest.raises(BadInputError, match=r"pooler\.dense\.weight is missing"):
        warm_start_params(drawn, str(tmp_path), cls, VOCABULARY)


def test_a_head_that_was_not_published_stays_as_drawn_and_that_is_said_once(
    tmp_path, caplog
):
    published, config = draw(seed=3)
    save_published(tmp_path, published, config)
    drawn, _ = draw(seed=4)
    with caplog.at_level(logging.INFO):
        params = warm_start_params(drawn, str(tmp_path), config, VOCABULARY)
    assert_same_bits(params["reader"]["head_dense"], drawn["reader"]["head_dense"])
    assert caplog.text.count("no masked-LM head") == 1


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"hidden": 32}, r"of shape \(.*32.*\) in .*, got \(.*16.*\)"),
        ({"shared": True}, r"expected retriever/tower/.*, got None"),
    ],
)
def test_a_stage_of_other_shapes_is_refused_by_name(earlier, sizes, named):
    folder, _ = earlier
    params, config = shapes(**sizes)
    with pytest.raises(BadInputError, match=named):
        warm_start_params(params, folder, config, VOCABULARY)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [("towers", "pooling", "mean"), ("bert", "num_heads", 1)],
)
def test_a_stage_of_the_same_shapes_and_another_meaning_is_refused(
    earlier, where, name, value
):
    folder, _ = earlier
    params, config = draw(seed=2)
    if where == "bert":
        changed = dataclasses.replace(config.bert, **{name: value})
        config = dataclasses.replace(config, bert=changed)
    else:
        config = dataclasses.replace(config, **{name: value})
    with pytest.raises(BadInputError, match=f"expected the model .*'{name}': "):
        warm_start_params(params, folder, config, VOCABULARY)


def test_a_vocabulary_of_the_same_size_and_other_words_is_refused(earlier, tmp_path):
    folder, published = earlier
    params, config = draw(seed=2)
    other = WordPiece([*SPECIAL_PIECES, *(f"v{i}" for i in range(35))])
    with pytest.raises(BadInputError, match="VOCABULARY"):
        warm_start_params(params, folder, config, other)
    save_published(tmp_path, published, config)
    VOCABULARY.save(tmp_path / "vocab.txt")
    warm_start_params(params, str(tmp_path), config, VOCABULARY)
    with pytest.raises(BadInputError, match="VOCABULARY"):
        warm_start_params(params, str(tmp_path), config, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_a_corpus_is_read_as_by_the_tokenizer_of_the_weights(tmp_path, settings):
    published, config = draw(seed=3)
    save_published(tmp_path, published, config)
    VOCABULARY.save(tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    params, _ = shapes()
    same = load_vocabulary(tmp_path / "vocab.txt")
    assert same.fingerprint != VOCABULARY.fingerprint
    warm_start_params(params, str(tmp_path), config, same)
    with pytest.raises(BadInputError, match=r"=False as in .*tokenizer_config\.json"):
        warm_start_params(params, str(tmp_path), config, VOCABULARY)


def test_published_weights_of_other_shapes_are_refused(tmp_path):
    published, config = draw(seed=3)
    save_published(tmp_path, published, config)
    params, larger = shapes(hidden=32)
    with pytest.raises(BadInputError, match="1 layers of 32"):
        warm_start_params(params, str(tmp_path), larger, VOCABULARY)


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_nothing_to_start_from_is_an_error(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    params, config = draw()
    with pytest.raises(BadInputError, match=r"WARM_START .*found neither"):
        warm_start_params(params, str(tmp_path / folder), config, VOCABULARY)
    assert not (tmp_path / "missing").exists()


@pytest.fixture
def sources(earlier, tmp_path):
    """An earlier stage and published weights: source -> its parameters."""
    stage, before = earlier
    published, config = draw(seed=3)
    save_published(tmp_path, published, config, with_head=True)
    return {stage: before, str(tmp_path): published}


@pytest.mark.parametrize("of_all", ["first", "second", ""])
@pytest.mark.parametrize("model", ["retriever", "reader"])
def test_one_model_may_come_from_a_source_of_its_own(sources, model, of_all):
    (other,) = {"retriever", "reader"} - {model}
    first, second = sources
    drawn, config = draw(seed=4)
    for source, own in ((first, second), (second, first)):
        general = {"first": source, "second": own, "": ""}[of_all]
        params = warm_start_params(
            drawn, general, config, VOCABULARY, **{f"{model}_source": own}
        )
        alone = warm_start_params(drawn, own, config, VOCABULARY)
        assert_same_bits(params[model], alone[model])
        rest = warm_start_params(drawn, general, config, VOCABULARY)
        assert_same_bits(params[other], rest[other])
        assert differing(params[model], drawn[model])
        assert bool(differing(params[other], drawn[other])) == bool(general)


def test_both_models_may_have_sources_of_their_own(sources):
    stage, folder = sources
    drawn, config = draw(seed=4)
    params = warm_start_params(
        drawn,
        "nowhere",
        config,
        VOCABULARY,
        retriever_source=stage,
        reader_source=folder,
    )
    assert_same_bits(params["retriever"], sources[stage]["retriever"])
    assert_same_bits(params["reader"], sources[folder]["reader"])


def test_a_reader_may_come_from_a_stage_with_other_towers(earlier):
    folder, before = earlier
    drawn, config = draw(seed=4)
    config = dataclasses.replace(config, pooling="mean")
    params = warm_start_params(drawn, "", config, VOCABULARY, reader_source=folder)
    assert_same_bits(params["reader"], before["reader"])
    with pytest.raises(BadInputError, match=r"^RETRIEVER_WARM_START of retriever: "):
        warm_start_params(drawn, "", config, VOCABULARY, retriever_source=folder)


@pytest.mark.parametrize("model", ["retriever", "reader"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_source_of_one_model_is_refused_with_its_macro(sources, model, number):
    source = list(sources)[number]
    wrong = {f"{model}_source": source}
    named = f"^{model.upper()}_WARM_START of {model}: "
    larger, larger_config = shapes(hidden=32)
    with pytest.raises(BadInputError, match=named + ".*32"):
        warm_start_params(larger, "", larger_config, VOCABULARY, **wrong)
    other = WordPiece([*SPECIAL_PIECES, *(f"v{i}" for i in range(35))])
    VOCABULARY.save(pathlib.Path(list(sources)[1]) / "vocab.txt")
    drawn, config = draw(seed=4)
    with pytest.raises(BadInputError, match=named + ".*VOCABULARY"):
        warm_start_params(drawn, "", config, other, **wrong)


@pytest.mark.parametrize("model", ["retriever", "reader"])
def test_a_source_of_one_model_that_is_not_there_is_refused(earlier, tmp_path, model):
    drawn, config = draw(seed=4)
    source = {f"{model}_source": str(tmp_path)}
    named = f"^{model.upper()}_WARM_START of {model}: .*found neither"
    with pytest.raises(BadInputError, match=named):
        warm_start_params(drawn, earlier[0], config, VOCABULARY, **source)


def test_a_source_of_both_models_is_refused_with_both_named(tmp_path):
    drawn, config = draw(seed=4)
    with pytest.raises(BadInputError, match=r"^WARM_START of retriever and reader: "):
        warm_start_params(drawn, str(tmp_path), config, VOCABULARY)


def test_the_description_tells_models_apart_and_is_json():
    one, same, other = (
        describe(tiny_world.models(hidden=size).retriever_config(VOCAB))
        for size in (16, 16, 32)
    )
    free = tiny_world.models().retriever_config(VOCAB)
    bert = dataclasses.replace(free.bert, dtype="bfloat16", remat="full")
    free = dataclasses.replace(free, bert=bert, projection_dropout=0.5)
    assert describe(free) == one
    assert one == same == json.loads(json.dumps(one))
    assert one != other
    assert np.all([one["bert"]["hidden_size"] == 16, one["shared"] is False])
