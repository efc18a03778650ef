"""The activation of published BERT weights goes with them, from stage to stage."""

import pytest

from realm_jax.cli import bert_settings
from realm_jax.data.wordpiece import SPECIAL_PIECES
from realm_jax.manifests import seal
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import manifest_name
from realm_jax.training.initialization import describe, recorded_activation
from tests import tiny_run
from tests.cli.chains import configuration_of
from tests.records import details_of
from tests.tiny_encoder import write_bert


@pytest.fixture
def published(tmp_path):
    """A BERT with GELU."""
    write_bert(tmp_path / "published", SPECIAL_PIECES)
    return tmp_path / "published"


def towers_of(command, root, *bindings):
    """The towers with which a command would begin."""
    files = ["gin/models/tiny.gin", f"gin/runs/{command.replace('-', '_')}.gin"]
    given = [*tiny_run.bindings(command, root), *bindings]
    config = bert_settings.follow_weights(configuration_of(command, files, given))
    return getattr(config, "finetuned", config).models.retriever_config(40)


def finish(model_dir, towers):
    """Writes the manifest of a checkpoint, of which nothing else is read here."""
    details = details_of(model=describe(towers))
    sealed = seal({"details": details, "files": {}})
    open_store(str(model_dir)).create(manifest_name(3), sealed)


def test_all_that_goes_on_from_published_weights_has_their_activation(
    published, tmp_path
):
    towers = towers_of("warm-start", tmp_path, f"WARM_START={published}")
    assert towers.bert.activation == "gelu"
    finish(tmp_path / "warm_start", towers)
    # The stages after it, and the warm start itself once the weights are gone.
    assert towers_of("pretrain", tmp_path) == towers
    assert towers_of("warm-start", tmp_path, "WARM_START=gone") == towers
    finish(tmp_path / "finetune", towers)
    assert towers_of("ask", tmp_path) == towers


def test_an_activation_that_gin_names_stays(published, tmp_path):
    named = 'bert.BertConfig.activation="gelu_tanh"'
    towers = towers_of("warm-start", tmp_path, f"WARM_START={published}", named)
    assert towers.bert.activation == "gelu_tanh"


def test_a_source_that_does_not_say_leaves_berts_own(published, tmp_path):
    (published / "config.json").unlink()
    for source in (str(published), "", str(tmp_path / "nothing")):
        assert recorded_activation(source) is None
    towers = towers_of("warm-start", tmp_path, f"WARM_START={published}")
    assert towers.bert.activation == "gelu_tanh"
