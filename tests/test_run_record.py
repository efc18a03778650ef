"""Each start of a command leaves its settings in the model directory."""

import dataclasses
import json
import re
import subprocess

import gin
import pytest

from realm_jax import run_record
from realm_jax.cli.main import main
from realm_jax.run_record import Attempt
from realm_jax.stages import STAGES
from realm_jax.storage import open_store
from realm_jax.training import recorded, warm_start
from tests import tiny_run
from tests.flipped import read_flipped
from tests.refused import refused


def starts(folder):
    return run_record.read_records(open_store(folder))


def test_every_command_of_a_chain_records_its_configuration(finished):
    for stage in ("warm_start", "pretrain", "finetune", "evaluate"):
        # Other tests go on with some of them.
        start = starts(finished / stage)[0]
        assert start.command == stage.replace("_", "-")
        assert f"--gin_file={finished}/sizes.gin" in start.arguments
    start = starts(finished / "pretrain")[0]
    assert start.seed == 0
    # Of the run file, and of the file that takes the sizes down.
    assert start.settings["optimizer"]["learning_rate"] == 3e-5
    assert start.settings["optimizer"]["total_steps"] == 12
    assert start.settings["models"]["bert"]["hidden_size"] == 16
    assert start.settings["models"]["lengths"]["joined"] == 72


@pytest.mark.process("git")
def test_the_commit_is_that_of_the_checkout(finished):
    command = ["git", "-C", str(tiny_run.ROOT), "rev-parse", "HEAD"]
    head = subprocess.check_output(command, text=True).strip()
    for start in starts(finished / "pretrain"):
        assert re.fullmatch(rf"{head}\+?", start.commit)


def test_what_gin_read_gives_the_same_configuration_again(finished):
    start = starts(finished / "finetune")[0]
    gin.clear_config()
    gin.parse_config(start.gin)
    config = gin.get_configurable(STAGES["finetune"].load_config())()
    assert json.loads(json.dumps(run_record.settings_of(config))) == start.settings


def test_a_start_with_other_settings_says_so(finished, tmp_path, capsys, monkeypatch):
    def run(config, report, stop, attempt):
        """Trains what is left, or nothing."""
        if config.train_steps > 60:
            attempt.begin(recorded.open_run(config.model_dir).trained)
        return True

    monkeypatch.setattr(warm_start, "run", run)
    root = tiny_run.copy(finished, tmp_path, "warm_start")
    arguments = tiny_run.chain_arguments("warm-start", root)
    before = len(starts(root / "warm_start"))

    def said(*more):
        assert main([*arguments, *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    # The copy has another name, and nothing else has changed.
    unchanged = said()
    assert "model_dir" in unchanged
    assert "learning_rate" not in unchanged
    name = "warm_start/optimizers.OptimizerConfig.learning_rate"
    in_vain = said(f"--gin.{name}=0.5")
    assert "optimizer.learning_rate 0.01 -> 0.5" in in_vain
    assert "no effect" in in_vain
    # Nothing was trained with them.
    assert len(starts(root / "warm_start")) == before
    longer = said("--gin.warm_start.WarmStartConfig.train_steps=61")
    assert "train_steps 60 -> 61" in longer
    assert "no effect" not in longer
    assert starts(root / "warm_start")[-1].settings["train_steps"] == 61
    longer = said("--gin.warm_start.WarmStartConfig.train_steps=62")
    assert "train_steps 61 -> 62" in longer


def test_starts_are_numbered_and_read_in_order(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Config:
        model_dir: str
        seed: int = 3
        inner: tuple[int, ...] = (1, 2)

    store = open_store(tmp_path)
    for command in ("pretrain", "pretrain", "build-index"):
        Attempt(command, Config(str(tmp_path)), ["--x"]).begin()
    names = ("build-index-0001", "pretrain-0001", "pretrain-0002")
    assert sorted(store.list("settings")) == [f"settings/{n}.json" for n in names]
    read = run_record.read_records(store)
    assert {one.command for one in read} == {"pretrain", "build-index"}
    assert read[0].seed == 3
    # As a report lists them.
    assert list(read[0].settings) == ["model_dir", "seed", "inner"]
    assert read[0].settings["inner"] == [1, 2]


def test_changes_name_what_differs_at_any_depth():
    before = {"a": 1, "b": {"c": [1], "d": 2.0}, "gone": "x"}
    now = {"a": 1, "b": {"c": [1, 2], "d": 2.0}, "new": None}
    assert run_record.changes(before, before) == []
    found = run_record.changes(before, now, missing="–")
    assert [dataclasses.astuple(change) for change in found] == [
        *(("b.c", [1], [1, 2]), ("gone", "x", "–"), ("new", "–", None))
    ]


RECORD = {
    "command": "pretrain",
    "started": "2026-05-01T10:00:00Z",
    "version": "0.2.0",
    "commit": None,
    "seed": 3,
    "arguments": ["--gin_file=gin/runs/pretrain.gin"],
    "settings": {"train_steps": 10, "optimizer": {"learning_rate": 1e-3}},
    "gin": "SEED = 3",
}


def write(folder, name, **changes):
    path = folder / "settings" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**RECORD, **changes}))
    return path


def test_starts_are_read_in_the_order_of_time(tmp_path):
    write(tmp_path, "pretrain-0002.json", started="2026-05-02T10:00:00Z")
    write(tmp_path, "pretrain-0001.json")
    second = {"command": "build-index", "started": "2026-05-01T11:00:00Z"}
    write(tmp_path, "build-index-0001.json", **second, seed=None)
    first, builder, last = run_record.read_records(open_store(tmp_path))
    assert first == run_record.RunRecord(**RECORD)
    assert (builder.command, builder.seed) == ("build-index", None)
    assert last.started == "2026-05-02T10:00:00Z"


def test_earlier_versions_recorded_nothing_and_later_ones_may_record_more(tmp_path):
    assert run_record.read_records(open_store(tmp_path)) == []
    assert run_record.read_records(open_store(tmp_path / "nothing")) == []
    write(tmp_path, "pretrain-0001.json", host="somewhere")
    (read,) = run_record.read_records(open_store(tmp_path))
    assert read == run_record.RunRecord(**RECORD)


def test_a_damaged_record_is_bad_input(tmp_path):
    path = write(tmp_path, "pretrain-0001.json")
    for text in (b"", b"[]", b"{", b'{"command": "pretrain"}', b"\xff"):
        path.write_bytes(text)
        with refused(rf"the record of a run.*{path}.*delete the file"):
            run_record.read_records(open_store(tmp_path))


def test_no_changed_bit_of_a_record_is_believed(tmp_path):
    store = open_store(tmp_path)
    run_record.write_record(store, run_record.RunRecord(**RECORD))
    (path,) = (tmp_path / "settings").iterdir()
    assert read_flipped(path, lambda: run_record.read_records(store)) == []
