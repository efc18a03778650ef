"""Bad input ends with one line that says what to do, code 2, and nothing half-written.

The commands run in this process; those whose death is of interest in their own.
"""

import resource
import socket
import subprocess
import sys

import pytest

from tests import compiled, tiny_run
from tests.cli.conftest import only_line


@pytest.fixture
def unchanged(refuse):
    """Refuses as `refuse` does, and leaves a folder as it was."""

    def run(root, arguments, *words):
        before = sorted(root.rglob("*"))
        line = refuse(arguments, *words)
        assert sorted(root.rglob("*")) == before
        return line

    return run


def replaced(arguments, name, value):
    """The arguments with another value of a macro or binding."""
    kept = [word for word in arguments if not word.startswith(f"--gin.{name}=")]
    return [*kept, f"--gin.{name}={value}"]


def test_command_lines(refuse, inputs):
    pretrain = tiny_run.arguments("pretrain", inputs)
    (inputs / "mine.gin").write_text("SEED = = 3\n")
    (inputs / "including.gin").write_text("include 'missing.gin'\n")
    for arguments, *words in (
        (["pretrian"], "'pretrian'", "pretrain"),
        ([*pretrain, "--step=3"], "--step=3"),
        (["pretrain"], "--gin_file", "realm pretrain --help"),
        (["pretrain", f"--gin_file={inputs}/none.gin"], f"{inputs}/none.gin"),
        (["pretrain", f"--gin_file={inputs}/mine.gin"], inputs / "mine.gin", "line 1"),
        (["pretrain", f"--gin_file={inputs}/including.gin"], "missing.gin"),
        # The run file of another command.
        (
            ["pretrain", *tiny_run.arguments("finetune", inputs)[1:]],
            "gin/runs/pretrain.gin",
        ),
        ([*pretrain, "--gin.BATCHSIZE=3"], "unknown macro 'BATCHSIZE'"),
        ([*pretrain, "--gin.pretrain.PretrainConfig.steps=3"], "steps"),
        ([*pretrain, "--gin.pretrain.PretrainConfg.seed=3"], "PretrainConfg"),
        *(([*pretrain, f"--gin.{one}"],) for one in ("TASK", "SEED=", "SEED=many", "")),
        # A text needs no quotes.
        ([*pretrain, "--gin.CORPUS=runs/x"], "a prepared corpus at runs/x"),
        # A macro that a file binds past: in silence the file's value would be taken.
        (
            [*pretrain, "--gin.TRAIN_STEPS=3"],
            "sizes.gin",
            "--gin.pretrain.PretrainConfig.train_steps=3",
        ),
        ([w for w in pretrain if not w.startswith("--gin.CORPUS")], "CORPUS"),
        ([*pretrain, "--import_module=my_corpora"], "my_corpora"),
        (
            tiny_run.arguments("finetune", inputs, REFRESH_MODE="never"),
            *("REFRESH_MODE", "'never'", "off, blocking, async, rolling"),
        ),
    ):
        refuse(arguments, *words)


def test_values_that_a_setting_does_not_take(unchanged, inputs, monkeypatch):
    """Before anything is read or written, also in the working directory."""
    monkeypatch.chdir(inputs)
    for stage, name, value, *words in (
        ("pretrain", "BATCH_SIZE", -512, "batch_size", "-512"),
        ("pretrain", "MODEL_DIR", '""', "model_dir"),
        ("pretrain", "pretrain/optimizers.OptimizerConfig.clip_norm", -1, "clip_norm"),
        ("prepare", "prepare.PrepareConfig.chunk_length", "'x'", "a whole number"),
    ):
        arguments = tiny_run.arguments(stage, inputs)
        unchanged(inputs, replaced(arguments, name, value), *words)


@pytest.mark.process("the exit code of the program")
def test_a_program_of_its_own_refuses_alike():
    for module in ("realm_jax.cli.main", "tpu_launch"):
        done = run_program([module, "pretrian"])
        assert done.returncode == 2
        assert "pretrian" in only_line(done.stderr)


class TestPrepare:
    def test_inputs(self, unchanged, inputs):
        prepare = tiny_run.arguments("prepare", inputs)
        vocabulary = inputs / "vocab.txt"
        vocabulary.touch()
        # What costs nothing is checked first.
        for name, value, *words in (
            ("prepare.PrepareConfig.tagger", "bert", "'bert'", "rules"),
            ("SOURCE", "nowhere.jsonl", "nowhere.jsonl"),
            ("QUESTIONS", "nowhere.jsonl", "nowhere.jsonl"),
            ("NAME", "my-towns", "my-towns"),
            ("VOCABULARY", vocabulary, vocabulary),
        ):
            unchanged(inputs, replaced(prepare, name, value), *words)

    def test_a_corpus_or_examples_of_other_settings(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        prepare = tiny_run.arguments("prepare", root)
        corpus, examples = root / "corpus", root / "corpus" / "examples"
        for name, value, *words in (
            ("chunk_length", 30, corpus, "chunk_length: 40, not 30"),
            ("inverse_cloze_query_length", 5, examples / "towns_ict"),
            ("validation_fraction", 0.4, examples, "validation_fraction"),
        ):
            refuse(replaced(prepare, f"prepare.PrepareConfig.{name}", value), *words)


class TestTraining:
    def test_without_a_corpus(self, unchanged, inputs):
        warm_start = tiny_run.arguments("warm-start", inputs)
        unchanged(inputs, warm_start, f"{inputs}/corpus")
        neither = tiny_run.arguments("warm-start", inputs, TASK="", PAIRS_TASK="")
        unchanged(inputs, neither, "TASK", "PAIRS_TASK", "got neither")
        for macros, *words in (
            (["RETRIEVED=0.5"], "got 1.0, 0.0 and 0.5", "OWN, NULL and RETRIEVED"),
            (["OWN=1.5", "NULL=-0.5"], "ReaderMixture.own", "got 1.5"),
            (["OWN=0.3", "NULL=0.3"], "sum to 1"),
        ):
            mixture = [f"--gin.{macro}" for macro in macros]
            unchanged(inputs, [*warm_start, *mixture], *words)

    def test_with_a_corpus(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
        pretrain = tiny_run.arguments("pretrain", root)
        finetune = {"WARM_START": f"{root}/warm_start", "CHECKPOINT": "best"}
        name = "pretrain/optimizers.OptimizerConfig.warmup_steps"
        assert "configurable" not in refuse(replaced(pretrain, name, 99), "99")
        # A stage that measures nothing has no best checkpoint.
        refuse(
            tiny_run.arguments("finetune", root, **finetune),
            f"{root}/warm_start",
            "held_out_utility",
            'CHECKPOINT="last"',
        )
        for stage in ("pretrain", "finetune"):
            assert not (root / stage / "checkpoints").exists()

    @pytest.mark.full
    def test_full_disk(self, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        done = run_program(
            ["realm_jax.cli.main", *tiny_run.arguments("warm-start", root)],
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
        )
        assert done.returncode == 2, done.stderr
        assert "full" in only_line(done.stderr)
        # No manifest, no checkpoint: the same command starts anew.
        assert not list((root / "warm_start").glob("checkpoints/*.json"))


def test_evaluate(refuse, inputs):
    control = {"PRETRAINED": "", "CONTROL_WARM_STARTED": f"{inputs}/control"}
    evaluate = tiny_run.arguments("evaluate", inputs, **control)
    refuse(evaluate, "expected PRETRAINED beside CONTROL_WARM_STARTED")
    assert not (inputs / "evaluate").exists()


class TestAsk:
    def test_models(self, refuse, finished, tmp_path):
        for command in ("ask", "finetune", "evaluate"):
            arguments = tiny_run.arguments(command, finished)
            kept = [word for word in arguments if "gin/models/" not in word]
            kept.remove(f"--gin_file={finished}/sizes.gin")
            refuse(kept, "--gin_file=gin/models/")
        ask = tiny_run.arguments("ask", finished, QUESTION="who")
        other = replaced(ask, "finetune/initialization.Lengths.document", 41)
        line = refuse(other, "lengths.document 41", "got 40")
        assert "{" not in line
        root = tiny_run.copy(finished, tmp_path, "corpus", "pretrain")
        untrained = tiny_run.arguments("ask", root, QUESTION="who")
        refuse(untrained, f"{root}/finetune", "first")
        assert not (root / "finetune").exists()

    def test_questions_and_ports(self, refuse, finished):
        ask = tiny_run.arguments("ask", finished)
        refuse([*ask, "--gin.QUESTION=who", "--gin.PORT=8000"], "QUESTION", "PORT")
        refuse([*ask, '--gin.QUESTION=" "'], "question")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            # Before a model is loaded.
            nothing = tiny_run.arguments("ask", finished, FINETUNED="nowhere")
            used = f"127.0.0.1:{port}"
            refuse([*nothing, f"--gin.PORT={port}"], used, "in use")
        refuse([*ask, "--gin.PORT=99999"], "99999")
        refuse([*ask, "--gin.PORT='8000'"], "PORT", "without quotes", "'8000'")
        nowhere = [*ask, "--gin.PORT=8000", '--gin.HOST="192.0.2.1"']
        refuse(nowhere, "192.0.2.1", "HOST")
        refuse([*ask, "--gin.ALLOWED_HOSTS='box'"], "ALLOWED_HOSTS", "'box'")


def run_program(arguments, limit=None):
    """Runs `python -m …`; `limit` is called in its process first."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        check=False,
        cwd=tiny_run.ROOT,
        # Compiled programs are files, too, and half of one must not stay.
        env=tiny_run.environment() | compiled.NOT_CACHED,
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
