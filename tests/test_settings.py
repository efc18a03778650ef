"""Each start of a command leaves its settings in the model directory."""

import dataclasses
import json
import re
import subprocess

import gin
import pytest

from realm_jax import settings
from realm_jax.cli.main import main
from realm_jax.cli.progress import StageProgress
from realm_jax.cli.starts import StartRecord
from realm_jax.errors import BadInputError
from realm_jax.stages import STAGES
from realm_jax.storage import open_store
from realm_jax.training import warm_start
from tests import tiny_run
from tests.flipped import read_flipped


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished chain; read only."""
    return tiny_run.finished(tmp_path_factory)


def starts(folder):
    return settings.read_starts(open_store(folder))


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
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=tiny_run.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for stage in ("warm_start", "pretrain"):
        for start in starts(finished / stage):
            assert re.fullmatch(rf"{head}\+?", start.commit)


def test_what_gin_read_gives_the_same_configuration_again(finished):
    start = starts(finished / "finetune")[0]
    gin.clear_config()
    gin.parse_config(start.gin)
    config = gin.get_configurable(STAGES["finetune"].load_config())()
    assert json.loads(json.dumps(settings.settings_of(config))) == start.settings


def test_a_start_with_other_settings_says_so(finished, tmp_path, capsys, monkeypatch):
    def run(config, report, stop):
        """Trains what is left, or nothing."""
        if config.train_steps > 60:
            report(config.train_steps, config.train_steps, {})
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
        seed: int = 3
        inner: tuple[int, ...] = (1, 2)

    store = open_store(tmp_path)
    start = settings.new_start("pretrain", Config(), ["--x"], str, {}, "1.2")
    names = [settings.write_start(store, start) for _ in range(2)]
    other = dataclasses.replace(start, command="build-index")
    names.append(settings.write_start(store, other))
    assert names == [
        "settings/pretrain-0001.json",
        "settings/pretrain-0002.json",
        "settings/build-index-0001.json",
    ]
    read = settings.read_starts(store)
    assert {one.command for one in read} == {"pretrain", "build-index"}
    assert read[0].seed == 3
    assert read[0].settings == {"seed": 3, "inner": [1, 2]}
    # As a report lists them.
    assert list(read[0].settings) == ["seed", "inner"]


def test_changes_name_what_differs_at_any_depth():
    before = {"a": 1, "b": {"c": [1], "d": 2.0}, "gone": "x"}
    now = {"a": 1, "b": {"c": [1, 2], "d": 2.0}, "new": None}
    assert settings.changes(before, before) == {}
    assert settings.changes(before, now) == {
        "b.c": "[1] -> [1, 2]",
        "gone": "x -> not set",
        "new": "not set -> None",
    }


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
    write(
        tmp_path,
        "build-index-0001.json",
        command="build-index",
        started="2026-05-01T11:00:00Z",
        seed=None,
    )
    first, builder, last = settings.read_starts(open_store(tmp_path))
    assert first == settings.Start(**RECORD)
    assert (builder.command, builder.seed) == ("build-index", None)
    assert last.started == "2026-05-02T10:00:00Z"


def test_earlier_versions_recorded_nothing_and_later_ones_may_record_more(tmp_path):
    assert settings.read_starts(open_store(tmp_path)) == []
    assert settings.read_starts(open_store(tmp_path / "nothing")) == []
    write(tmp_path, "pretrain-0001.json", host="somewhere")
    assert settings.read_starts(open_store(tmp_path)) == [settings.Start(**RECORD)]


def test_a_damaged_record_is_bad_input(tmp_path):
    path = write(tmp_path, "pretrain-0001.json")
    for text in ("", "[]", "{", '{"command": "pretrain"}', "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(BadInputError, match="a record of a start") as error:
            settings.read_starts(open_store(tmp_path))
        assert str(path) in str(error.value)
        assert "delete the file" in str(error.value)


def test_no_changed_bit_of_a_record_is_believed(tmp_path):
    store = open_store(tmp_path)
    name = settings.write_start(store, settings.Start(**RECORD))
    read = read_flipped(tmp_path / name, lambda: settings.read_starts(store))
    # Without the key of the checksum it is a record of an earlier version.
    assert read
    assert all(starts == [settings.Start(**RECORD)] for starts in read)


def test_a_damaged_record_does_not_end_what_starts_later(tmp_path, capsys):
    @dataclasses.dataclass(frozen=True)
    class Config:
        model_dir: str = str(tmp_path)

    damaged = write(tmp_path, "pretrain-0001.json")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    progress = StageProgress("pretrain")
    StartRecord("pretrain", Config(), [], progress)
    progress(1, 2)
    said = " ".join(capsys.readouterr().out.split())
    assert "expected a record of a start in" in said
    damaged.unlink()
    assert [start.command for start in starts(tmp_path)] == ["pretrain"]
