"""`--weights` takes sentence encoders as sentence-transformers saves them.

The folders and embeddings of `published_encoders.tar.xz` were made by
`bench/peers/published_encoders.py` with sentence-transformers itself.
"""

import dataclasses
import json
import pathlib
import shutil
import tarfile

import jax
import numpy as np
import pytest

from realm_jax.data.features import query_row
from realm_jax.data.layout import document_inputs, from_lists
from realm_jax.data.tokenizer_files import load_vocabulary, vocabulary_file
from realm_jax.errors import BadInputError
from realm_jax.models.retriever import Retriever
from realm_jax.training.initialization import warm_start_params
from realm_jax.weights.published_encoder import prompt_pieces, prompt_text
from realm_jax.weights.sentence_encoder import scale_of_export
from tests import tiny_run
from tests.cli.chains import configs_of
from tests.weights.tiny_classifier import edit_tensors

ARCHIVE = pathlib.Path(__file__).with_name("published_encoders.tar.xz")
LENGTH = 64
FOUND = {
    "gte": "8 wide, mean pooling, not normalised; kept",
    "bge": "8 wide, [CLS] pooling, normalised; kept",
    "e5": "8 wide, mean pooling, normalised, query prompt 'query: ', document prompt "
    "'passage: '; kept",
    "labse": "8 wide, [CLS] pooling, a dense layer (tanh), normalised; kept",
    "arctic": "8 wide, [CLS] pooling, normalised, query prompt 'query: '; kept",
    "dense": "6 wide, mean pooling, a dense layer (identity), not normalised, query "
    "prompt 'query: ', document prompt 'passage: '; kept",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.fixture
def text(tmp_path, monkeypatch):
    """articles.jsonl, of words that the small vocabulary does not have."""
    monkeypatch.chdir(tmp_path)
    tiny_run.make_inputs(tmp_path, num_articles=20)
    monkeypatch.setattr(
        "realm_jax.prepare.first_chain.require_known", lambda *arguments: None
    )
    return tmp_path


def init(folder, *more):
    return ["init", "runs/my", "--source=articles.jsonl", f"--weights={folder}", *more]


def towers(vocabulary):
    """The towers of the chain's first stage, computed in float32."""
    stage = configs_of("runs/my/chain.gin")["warm-start"]
    config = stage.models.retriever_config(vocabulary.size)
    bert = dataclasses.replace(config.bert, products="float32")
    return stage, dataclasses.replace(config, bert=bert)


def started(folder, config, vocabulary, inputs):
    """Parameters of the towers, all from the folder."""
    init = Retriever(config).init
    shapes = jax.eval_shape(init, jax.random.key(0), *inputs)["params"]
    nothing = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), shapes)
    params = {"retriever": nothing, "reader": {}}
    source = {"retriever_source": str(folder)}
    return warm_start_params(params, "", config, vocabulary, **source)["retriever"]


@pytest.mark.parametrize("name", FOUND)
def test_the_towers_of_a_chain_begin_with_its_embeddings(name, folders, text, realm):
    folder = folders / name
    expected = json.loads((folder / "expected.json").read_text())
    given = expected["given"] or {}
    flags = [
        f"--{kind}_prompt={prompt}"
        for kind, prompt in zip(("query", "document"), given.values(), strict=False)
    ]
    assert f"encoder: {FOUND[name]} as wide" in realm(*init(folder, *flags))
    vocabulary = load_vocabulary(vocabulary_file(folder))
    stage, config = towers(vocabulary)
    assert stage.warm_start == str(folder)
    assert not config.shared
    titles, bodies = (
        vocabulary.ids_batch([pair[side] for pair in expected["pairs"]])
        for side in (0, 1)
    )
    queries = [
        query_row(pieces, LENGTH, vocabulary)
        for pieces in vocabulary.ids_batch(expected["texts"])
    ]
    documents = document_inputs(
        from_lists(titles, bodies), LENGTH, vocabulary.cls, vocabulary.sep, np
    )
    inputs = (np.stack(queries), *documents)
    kinds = ("queries", "documents")
    for shared in (False, True):
        config = dataclasses.replace(config, shared=shared)
        params = started(folder, config, vocabulary, inputs)
        embeddings = jax.jit(Retriever(config).apply)({"params": params}, *inputs)
        scale = scale_of_export(config)
        for kind, found in zip(kinds, embeddings, strict=True):
            np.testing.assert_allclose(found * scale, expected[kind], atol=1e-5)


def test_fewer_features_are_a_projection_of_its_embedding(folders, text, realm):
    folder = folders / "labse"
    said = realm(*init(folder, "--width=4"))
    assert "projected to 4 (--width=8 keeps them all)" in said
    stage, config = towers(load_vocabulary(vocabulary_file(folder)))
    projection = (config.projected, config.projection_size, config.layer_norm)
    assert projection == (True, 4, True)
    assert (config.dense_size, config.normalize) == (8, True)
    # As of all projections, whose LayerNorm makes the length what it is.
    assert config.temperature == 16.0
    assert stage.projection == "lda"


def changed(folder, file, **values):
    """Changes values of a JSON file in a folder; None removes one."""
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= values
    kept = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))


def with_modules(folder, change):
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(change(*modules)))


def narrow(tensors):
    tensors["linear.weight"] = np.ascontiguousarray(tensors["linear.weight"][:, :-1])


def flags_of_older_versions(*modes):
    names = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens")
    flags = {f"pooling_mode_{name}": name in modes for name in names}
    return {"pooling_mode": None, **flags}


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
PROMPTS = "config_sentence_transformers.json"
INPUT = "sentence_bert_config.json"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: changed(f, "config.json", model_type="xlm-roberta"),
         ["'xlm-roberta'", "'bert'"]),
        (lambda f: changed(f, "config.json", max_position_embeddings=64),
         ["112 positions"]),
        (lambda f: changed(f, "config.json", intermediate_size=16), ["shape"]),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
         ["pytorch_model.bin", "cannot be read"]),
        (lambda f: changed(f, POOLING, pooling_mode="lasttoken"), ["lasttoken"]),
        (lambda f: changed(f, POOLING, pooling_mode=["cls", "mean"]), ["cls and mean"]),
        (lambda f: changed(f, POOLING, **flags_of_older_versions("max_tokens")),
         ["got max"]),
        (lambda f: changed(
            f, POOLING, **flags_of_older_versions("cls_token", "mean_tokens")),
         ["cls and mean"]),
        (lambda f: changed(f, POOLING, embedding_dimension=16), ["8", "16"]),
        (lambda f: changed(f, DENSE, activation_function="torch.nn.ReLU"), ["ReLU"]),
        (lambda f: changed(f, DENSE, use_residual=True), ["residual"]),
        (lambda f: changed(f, DENSE, in_features=6), ["in_features", "got 6"]),
        (lambda f: changed(f, DENSE, out_features=6), ["(6, 8)", "(8, 8)"]),
        (lambda f: edit_tensors(f / "2_Dense", narrow), ["(8, 8)", "(8, 7)"]),
        (lambda f: (f / "2_Dense/model.safetensors").unlink(), ["model.safetensors"]),
        (lambda f: with_modules(f, lambda first, *_: [first]),
         ["Pooling", "got Transformer"]),
        (lambda f: with_modules(
            f, lambda first, *others: [first | {"path": "0_Transformer"}, *others]),
         ["0_Transformer"]),
        (lambda f: (f / "modules.json").write_text("[1]"), ["list of modules"]),
        (lambda f: (f / "modules.json").unlink(), ["modules.json beside 1_Pooling"]),
        (lambda f: shutil.rmtree(f / "1_Pooling"), ["1_Pooling", "fetch"]),
        (lambda f: changed(f, INPUT, max_seq_length=32), ["max_seq_length", "96"]),
        (lambda f: changed(f, INPUT, max_seq_length="32"), ["max_seq_length"]),
        (lambda f: changed(f, PROMPTS, prompts={"query": "find"}), ["'find'", "space"]),
        (lambda f: changed(f, PROMPTS, prompts={"query": "§ "}), ["'§ '", "lacks"]),
        (lambda f: changed(f, PROMPTS, prompts=["query: "]), ["by their names"]),
    ],
)  # fmt: skip
def test_what_cannot_be_a_start_is_one_line(spoil, words, folders, text, refuse):
    folder = text / "weights"
    shutil.copytree(folders / "labse", folder)
    spoil(folder)
    refuse(init(folder), *words)
    assert not (text / "runs").exists()


@pytest.mark.usefixtures("text")
def test_options_that_do_not_fit(folders, refuse):
    refuse(init(folders / "bge", "--width=9"), "from 1 to 8")
    refuse(init(folders / "bge", "--width=0"), "from 1 to 8")
    refuse(init("", "--query_prompt=query: "), "--weights=FOLDER beside --query_prompt")


def test_pooling_of_older_versions_and_prompts_that_are_taken_away(
    folders, text, realm
):
    folder = text / "weights"
    shutil.copytree(folders / "dense", folder)
    changed(folder, POOLING, **flags_of_older_versions("cls_token"))
    changed(folder, PROMPTS, prompts={"other": "who: "}, default_prompt_name="other")
    said = realm(*init(folder, "--document_prompt="))
    assert "[CLS] pooling" in said
    # The default one is for what has none of its own.
    assert "query prompt 'who: '; kept" in said


def test_a_prompt_has_the_wordpieces_that_it_has_in_front_of_any_text(folders):
    vocabulary = load_vocabulary(vocabulary_file(folders / "bge"))
    for prompt in ("query: ", "Passage:", "who is, near ", ""):
        pieces = list(prompt_pieces(prompt, vocabulary))
        for text in ("town", "is the", "?", ""):
            together = vocabulary.encode(prompt + text).ids.tolist()
            assert together == pieces + vocabulary.encode(text).ids.tolist()
        again = prompt_text(pieces, vocabulary)
        assert list(prompt_pieces(again, vocabulary)) == pieces
    assert prompt_text(prompt_pieces("query: ", vocabulary), vocabulary) == "query: "
    with pytest.raises(BadInputError, match="ends with a space"):
        prompt_pieces("query", vocabulary)
