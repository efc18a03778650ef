"""Who lacks an extra is told its name, before any work is done."""

import sys
from typing import Any

from realm_jax.cli.main import main
from realm_jax.extras import require_extra
from realm_jax.index.builder import BuilderConfig, IndexBuilder
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.scann_assets import ScannAssets
from realm_jax.index.source import IndexSource
from realm_jax.prepare.documents.open import open_source
from realm_jax.storage import open_store
from tests import tiny_run
from tests.refused import refused
from tpu_launch.records import LaunchRecord

COMMANDS = {
    "prepare": ("tensorflow", "prepare", []),
    "update-corpus": ("apache_beam", "prepare", []),
    "ask": ("aiohttp", "serve", ["--gin.PORT=8000"]),
}

NOT_REACHED: Any = None


def hide(monkeypatch, module):
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, module, None)


def test_a_command_without_its_extra(monkeypatch, capsys, tmp_path):
    tiny_run.make_inputs(tmp_path)
    before = sorted(tmp_path.iterdir())
    for command, (module, extra, macros) in COMMANDS.items():
        words = tiny_run.arguments(command, tmp_path)
        with monkeypatch.context() as patch:
            hide(patch, module)
            assert main([*words, *macros]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: expected {module} for ")
        assert line.endswith(f"run pip install 'realm_jax[{extra}]'")
    hide(monkeypatch, "seqio")
    assert main(["tasks"]) == 2
    assert "pip install 'realm_jax[prepare]'" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_gs_without_its_clients(monkeypatch):
    for module in ("google.cloud.storage", "gcsfs"):
        hide(monkeypatch, module)
        said = rf"{module} for gs://b.*realm_jax\[gcs\]"
        with refused(said):
            open_store("gs://bucket/x.jsonl")
        with refused(said):
            open_source("json:gs://bucket/x.jsonl")
        monkeypatch.undo()


def test_an_engine_without_its_client(monkeypatch):
    for backend, module in (("tpu_vm", "google.cloud.tpu_v2"), ("gke", "kubernetes")):
        hide(monkeypatch, module)
        with refused(r"realm_jax\[launch\]"):
            LaunchRecord("run", backend, {}, 0.0).engine()


def test_scann_is_missed_before_an_index_is_made(monkeypatch, tmp_path):
    hide(monkeypatch, "scann")
    store = open_store(tmp_path / "model")
    with refused(r"searcher 'scann'.*realm_jax\[scann\]"):
        IndexSource(store, NOT_REACHED, NOT_REACHED, EmbedConfig(), "scann")
    with refused(r"realm_jax\[scann\]"):
        IndexBuilder(store, NOT_REACHED, BuilderConfig(scann=ScannAssets()))
    assert not (tmp_path / "model").exists()


def test_a_package_around_a_module_may_be_missing(monkeypatch):
    hide(monkeypatch, "google.cloud")
    # Other tests of this process have imported it.
    monkeypatch.delitem(sys.modules, "google.cloud.storage", raising=False)
    with refused(r"google\.cloud\.storage"):
        require_extra("gcs", "a test")
