"""SeqIO's own caching tool, run as a person would."""

import os
import subprocess
import sys

import pytest
import seqio

from realm_jax.prepare.materialise import materialise
from tests import tiny_run

pytestmark = pytest.mark.full

_MODULE = """
from tasks import corpora
corpora.register(
    "stored", {directory!r}, query_length=32, inverse_cloze_query_length=32,
    document_length=40, max_masks=6, num_shards=3, validation_fraction=0.2,
)
"""


@pytest.mark.usefixtures("registry")
def test_seqios_own_tool_caches_the_tasks_of_a_corpus(store, tmp_path, monkeypatch):
    (tmp_path / "my_towns.py").write_text(
        _MODULE.format(directory=str(store.directory))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "seqio.scripts.cache_tasks_main"),
            "--module_import=my_towns",
            "--tasks=stored_salient",
            f"--output_cache_dir={tmp_path}/cache",
            "--pipeline_options=--runner=DirectRunner",
        ],
        check=False,
        cwd=tiny_run.ROOT,
        env=tiny_run.environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}."},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    __import__("my_towns")
    seqio.add_global_cache_dirs([str(tmp_path / "cache")])
    made = {
        cached: materialise(
            "stored_salient", "train", tmp_path / str(cached), use_cached=cached
        )
        for cached in (False, True)
    }
    # The tool shuffles what it writes.
    assert rows(made[True]) == rows(made[False])
    assert len(made[True]) > 0


def rows(examples):
    """Every example as bytes, all features together, sorted."""
    names = sorted(examples.features)
    return sorted(
        b"".join(examples.features[name][i].tobytes() for name in names)
        for i in range(len(examples))
    )
