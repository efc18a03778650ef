"""An evaluation gives the same bytes on any number of devices and processes."""

import json

import pytest

from tests import groups, tiny_run

pytestmark = pytest.mark.full


def predictions(root, folder, num_processes, devices):
    """What `realm evaluate` writes of the shared chain, and what processes say."""
    words = tiny_run.arguments("evaluate", root, MODEL_DIR=str(folder))
    program = ["realm_jax.cli.main", *words]
    with groups.started(program, num_processes, devices) as group:
        said = group.wait()
    return (folder / "predictions.jsonl").read_bytes(), said


def test_predictions_are_the_same_bytes_on_all_devices(
    tmp_path_factory, tmp_path, monkeypatch
):
    # As XLA compiles for users: what it fuses may depend on the devices.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "false")
    monkeypatch.delenv("XLA_FLAGS")
    root = tiny_run.finished(tmp_path_factory)
    alone, _ = predictions(root, tmp_path / "alone", 1, 1)
    assert len(alone.splitlines()) == 20
    for num_processes, devices in ((1, 8), (2, 1)):
        folder = tmp_path / f"{num_processes}x{devices}"
        found, said = predictions(root, folder, num_processes, devices)
        assert found == alone, (num_processes, devices)
        assert len(said) == num_processes
        # One record and one report, whoever took part.
        assert [path.name for path in folder.glob("settings/*")] == [
            "evaluate-0001.json"
        ]
        report = json.loads((folder / "report.json").read_text())
        assert report["files"]["predictions.jsonl"]["size"] == len(alone)
