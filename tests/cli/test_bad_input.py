"""Bad input ends with one line that says what to do, code 2, and nothing half-written.

The commands run in this process; those whose death is of interest in their own.
"""

import json
import pathlib
import resource
import shutil
import socket
import subprocess
import sys

import pytest

from realm_jax.cli.main import main
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import WordPiece
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all
from tests import compiled, tiny_run
from tests.corpus_builder import build_corpus


@pytest.fixture
def refuse(capsys):
    """Runs a command that must refuse; returns its one line."""

    def run(arguments, *words):
        capsys.readouterr()
        assert main(arguments) == 2
        line = only_line(capsys.readouterr().err)
        for word in words:
            assert str(word) in line
        return line

    return run


@pytest.fixture
def inputs(tmp_path):
    tiny_run.make_inputs(tmp_path)
    return tmp_path


def only_line(said: str) -> str:
    lines = said.splitlines()
    assert len(lines) == 1, said
    assert lines[0].startswith("error: ")
    # What was expected, what arrived, what to do: more than a word.
    assert len(lines[0].split()) > 5
    return lines[0]


def files_below(root: pathlib.Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def replaced(arguments, name, value):
    """The arguments with another value of a macro or binding."""
    kept = [word for word in arguments if not word.startswith(f"--gin.{name}=")]
    return [*kept, f"--gin.{name}={value}"]


class TestCommandLine:
    def test_unknown_command(self, refuse):
        refuse(["pretrian"], "'pretrian'", "pretrain")

    def test_unknown_flag(self, refuse, inputs):
        refuse([*tiny_run.arguments("pretrain", inputs), "--step=3"], "--step=3")

    def test_no_gin_file(self, refuse):
        refuse(["pretrain"], "--gin_file", "realm pretrain --help")

    def test_missing_gin_file(self, refuse, inputs):
        arguments = ["pretrain", f"--gin_file={inputs}/none.gin"]
        refuse(arguments, f"{inputs}/none.gin")

    def test_gin_file_with_a_mistake(self, refuse, inputs):
        path = inputs / "mine.gin"
        path.write_text("SEED = = 3\n")
        refuse(["pretrain", f"--gin_file={path}"], path, "line 1")

    def test_file_that_includes_another_that_is_missing(self, refuse, inputs):
        path = inputs / "mine.gin"
        path.write_text("include 'none.gin'\n")
        refuse(["pretrain", f"--gin_file={path}"], "none.gin")

    def test_run_file_of_another_command(self, refuse, inputs):
        arguments = tiny_run.arguments("finetune", inputs)
        refuse(["pretrain", *arguments[1:]], "gin/runs/pretrain.gin")

    def test_unknown_macro(self, refuse, inputs):
        arguments = tiny_run.arguments("pretrain", inputs)
        refuse([*arguments, "--gin.BATCHSIZE=3"], "unknown macro 'BATCHSIZE'")

    def test_unknown_binding(self, refuse, inputs):
        arguments = tiny_run.arguments("pretrain", inputs)
        refuse([*arguments, "--gin.pretrain.PretrainConfig.steps=3"], "steps")

    def test_unknown_class(self, refuse, inputs):
        arguments = tiny_run.arguments("pretrain", inputs)
        refuse([*arguments, "--gin.pretrain.PretrainConfg.seed=3"], "PretrainConfg")

    @pytest.mark.parametrize("binding", ["TASK", "SEED=", "SEED=many", "=3", ""])
    def test_binding_without_a_proper_value(self, refuse, inputs, binding):
        refuse([*tiny_run.arguments("pretrain", inputs), f"--gin.{binding}"])

    def test_a_text_needs_no_quotes(self, refuse, inputs):
        arguments = [*tiny_run.arguments("pretrain", inputs), "--gin.CORPUS=runs/x"]
        refuse(arguments, "a prepared corpus at runs/x")

    def test_a_macro_that_a_file_binds_past(self, refuse, inputs):
        """In silence it would train as many steps as the file says."""
        arguments = [*tiny_run.arguments("pretrain", inputs), "--gin.TRAIN_STEPS=3"]
        refuse(arguments, "sizes.gin", "--gin.pretrain.PretrainConfig.train_steps=3")

    @pytest.mark.parametrize("value", ["'x'", "2.5", "True"])
    def test_a_value_of_another_type(self, refuse, inputs, value):
        name = "prepare.PrepareConfig.chunk_length"
        arguments = replaced(tiny_run.arguments("prepare", inputs), name, value)
        refuse(arguments, "chunk_length", "a whole number")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("BATCH_SIZE", 0),
            ("BATCH_SIZE", -512),
            ("CHECKPOINT_PERIOD", 0),
            ("LOG_PERIOD", 0),
            ("REFRESH_PERIOD", 0),
            ("MODEL_DIR", '""'),
            ("LEARNING_RATE", -1),
            ("pretrain/optimizers.OptimizerConfig.clip_norm", -1),
        ],
    )
    def test_a_value_out_of_range(self, refuse, inputs, monkeypatch, name, value):
        """Before anything is read or written, also in the working directory."""
        monkeypatch.chdir(inputs)
        before = files_below(inputs)
        arguments = replaced(tiny_run.arguments("pretrain", inputs), name, value)
        refuse(arguments, name.rpartition(".")[2].lower(), str(value).strip('"'))
        assert files_below(inputs) == before

    def test_required_macro_missing(self, refuse, inputs):
        arguments = tiny_run.arguments("warm-start", inputs)
        kept = [word for word in arguments if not word.startswith("--gin.CORPUS")]
        refuse(kept, "CORPUS")

    def test_unknown_module(self, refuse, inputs):
        arguments = tiny_run.arguments("prepare", inputs)
        refuse([*arguments, "--import_module=my_corpora"], "my_corpora")

    def test_unknown_choice(self, refuse, inputs):
        arguments = tiny_run.arguments("pretrain", inputs, REFRESH_MODE="never")
        refuse(arguments, "REFRESH_MODE", "'never'", "blocking")

    @pytest.mark.process("the exit code of the program")
    def test_a_program_of_its_own_refuses_alike(self, inputs):
        for module in ("realm_jax.cli.main", "tpu_launch"):
            done = run_program([module, "pretrian"])
            assert done.returncode == 2
            assert "pretrian" in only_line(done.stderr)
        done = run_program(["realm_jax.cli.pretrain", "--gin_file=none.gin"])
        assert done.returncode == 2
        assert "none.gin" in only_line(done.stderr)


class TestPrepare:
    def test_missing_source(self, refuse, inputs):
        before = files_below(inputs)
        arguments = tiny_run.arguments("prepare", inputs, SOURCE="nowhere.jsonl")
        refuse(arguments, "nowhere.jsonl")
        assert files_below(inputs) == before

    @pytest.mark.parametrize(
        "text", ["", "\n\n", "{}\n", "no JSON\n", '{"title": "a", "text": ""}\n']
    )
    def test_source_without_documents(self, refuse, inputs, text):
        (inputs / "articles.jsonl").write_text(text)
        before = files_below(inputs)
        refuse(tiny_run.arguments("prepare", inputs))
        assert files_below(inputs) == before

    def test_unknown_tagger(self, refuse, inputs):
        sizes = "prepare.PrepareConfig.tagger"
        arguments = tiny_run.arguments("prepare", inputs)
        refuse(replaced(arguments, sizes, '"bert"'), "'bert'", "rules")

    @pytest.mark.parametrize("pieces", ["", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nhalf\n"])
    def test_wrong_vocabulary(self, refuse, inputs, pieces):
        (inputs / "vocab.txt").write_text(pieces)
        before = files_below(inputs)
        vocabulary = str(inputs / "vocab.txt")
        arguments = tiny_run.arguments("prepare", inputs, VOCABULARY=vocabulary)
        refuse(arguments, vocabulary)
        assert files_below(inputs) == before

    def test_what_costs_nothing_is_checked_first(self, refuse, inputs):
        before = files_below(inputs)
        arguments = tiny_run.arguments("prepare", inputs, QUESTIONS="nowhere.jsonl")
        refuse(arguments, "nowhere.jsonl")
        refuse(tiny_run.arguments("prepare", inputs, NAME="my-towns"), "'my-towns'")
        assert files_below(inputs) == before

    @pytest.mark.usefixtures("registry")
    def test_no_article_for_validation(self, refuse, finished, tmp_path):
        inputs = tiny_run.copy(finished, tmp_path, "corpus")
        shutil.rmtree(inputs / "corpus" / "examples")
        fraction = "prepare.PrepareConfig.validation_fraction"
        arguments = replaced(tiny_run.arguments("prepare", inputs), fraction, 0.0)
        refuse(arguments, "'validation'")
        # Nothing is left that another fraction would train on.
        assert not list((inputs / "corpus" / "examples").glob("*/*"))

    def test_corpus_of_another_vocabulary(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        arguments = tiny_run.arguments("prepare", root)
        size = "prepare.PrepareConfig.vocabulary_size"
        asked = "vocabulary_size: 300, not 290"
        refuse(replaced(arguments, size, 290), f"{root}/corpus", asked)
        given = str(root / "corpus" / "vocab.txt")
        arguments = tiny_run.arguments("prepare", root, VOCABULARY=given)
        refuse(arguments, f"{root}/corpus", "trained on it, not given")

    def test_corpus_of_other_settings_or_text(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        arguments = tiny_run.arguments("prepare", root)
        chunk_length = "prepare.PrepareConfig.chunk_length"
        said = "chunk_length: 40, not 30"
        refuse(replaced(arguments, chunk_length, 30), f"{root}/corpus", said)
        with (root / "articles.jsonl").open("a") as file:
            file.write('{"title": "More", "text": "There is more."}\n')
        refuse(arguments, f"{root}/corpus", "another corpus", "other text")

    def test_examples_of_other_lengths_or_questions(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        arguments = tiny_run.arguments("prepare", root)
        examples = root / "corpus" / "examples"
        for task, name in {
            "salient": "max_masks",
            "ict": "inverse_cloze_query_length",
        }.items():
            binding = f"prepare.PrepareConfig.{name}"
            folder = examples / f"towns_{task}"
            refuse(replaced(arguments, binding, 5), folder)
        for name, value in {"validation_fraction": 0.4, "seed": 3}.items():
            binding = f"prepare.PrepareConfig.{name}"
            refuse(replaced(arguments, binding, value), examples, name)
        questions = (root / "questions.jsonl").read_text()
        (root / "questions.jsonl").write_text(questions.replace("1200", "1199"))
        folder = examples / "towns_questions"
        refuse(arguments, folder / "train", "questions have changed", f"rm -r {folder}")

    @pytest.mark.full
    def test_full_disk(self, inputs):
        done = run_program(
            ["realm_jax.cli.main", *tiny_run.arguments("prepare", inputs)],
            largest_file=2000,
        )
        assert done.returncode == 2
        line = only_line(done.stderr)
        assert "room" in line
        # A folder of another name may stay, which the next run clears away.
        assert not (inputs / "corpus").exists()


class TestTraining:
    def test_missing_corpus(self, refuse, inputs):
        refuse(tiny_run.arguments("warm-start", inputs), f"{inputs}/corpus")
        assert not (inputs / "warm_start").exists()

    def test_unknown_task(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        arguments = tiny_run.arguments("warm-start", root, TASK="town_salient")
        refuse(arguments, "town_salient")

    def test_a_warm_start_of_neither_model(self, refuse, inputs):
        arguments = tiny_run.arguments("warm-start", inputs, TASK="", PAIRS_TASK="")
        refuse(arguments, "TASK", "PAIRS_TASK", "got neither")
        assert not (inputs / "warm_start").exists()

    @pytest.mark.parametrize(
        ("macros", "named"),
        [
            ({"RETRIEVED": 0.5}, ["got 1.0, 0.0 and 0.5", "OWN, NULL and RETRIEVED"]),
            ({"OWN": 1.5, "NULL": -0.5}, ["ReaderMixture.own", "got 1.5"]),
            ({"OWN": 0.3, "NULL": 0.3}, ["sum to 1"]),
        ],
    )
    def test_a_mixture_that_is_none(self, refuse, inputs, macros, named):
        arguments = tiny_run.arguments("warm-start", inputs)
        more = [f"--gin.{name}={value}" for name, value in macros.items()]
        refuse([*arguments, *more], *named)
        assert not (inputs / "warm_start").exists()

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [("num_retrieved", 0, "got 0"), ("without_answer", "'none'", "own, null")],
    )
    def test_retrieved_documents_of_no_kind(self, refuse, inputs, name, value, words):
        arguments = tiny_run.arguments("warm-start", inputs)
        binding = f"--gin.warm_start.ReaderMixture.{name}={value}"
        refuse([*arguments, binding], name, words)

    def test_examples_of_another_corpus(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        (root / "other").mkdir()
        other_corpus(finished, root / "other")
        (root / "corpus" / "examples").rename(root / "other" / "corpus" / "examples")
        corpus = str(root / "other" / "corpus")
        arguments = tiny_run.arguments("warm-start", root, CORPUS=corpus)
        refuse(arguments, "corpus_fingerprint")

    def test_no_warm_start(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        refuse(tiny_run.arguments("pretrain", root), f"{root}/warm_start", "WARM_START")
        assert not (root / "pretrain" / "checkpoints").exists()

    def test_best_checkpoint_of_a_stage_that_measures_none(
        self, refuse, finished, tmp_path
    ):
        root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
        of_stage = {"WARM_START": f"{root}/warm_start", "CHECKPOINT": "best"}
        arguments = tiny_run.arguments("finetune", root, **of_stage)
        refuse(arguments, f"{root}/warm_start", "held_out_utility", 'CHECKPOINT="last"')
        assert not (root / "finetune" / "checkpoints").exists()

    @pytest.mark.parametrize("model", ["retriever", "reader"])
    def test_a_source_of_one_model(self, refuse, finished, tmp_path, model):
        root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
        macro = f"{model.upper()}_WARM_START"
        start = f"error: {macro} of {model}: "
        nowhere = {macro: f"{root}/nowhere"}
        arguments = tiny_run.arguments("pretrain", root, **nowhere)
        assert refuse(arguments, f"{root}/nowhere").startswith(start)
        of_size = {macro: f"{root}/warm_start", "WARM_START": ""}
        arguments = tiny_run.arguments("pretrain", root, **of_size)
        arguments = replaced(arguments, "bert.BertConfig.mlp_size", 48)
        line = refuse(arguments, "mlp_input", "(1, 48)", "(1, 32)")
        assert line.startswith(start)
        assert not (root / "pretrain" / "checkpoints").exists()

    def test_optimizer_of_each_model(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        arguments = tiny_run.arguments("warm-start", root)
        name = "warm_start/optimizers.OptimizerConfig"
        refuse(replaced(arguments, f"{name}.clip", '"each"'), "'each'", "per_model")
        refuse(replaced(arguments, f"{name}.retriever_rate", 0.0), "0.0", "frozen")

    def test_weights_of_another_shape(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
        arguments = tiny_run.arguments("pretrain", root)
        other = replaced(arguments, "bert.BertConfig.mlp_size", 48)
        refuse(other, "mlp_input", "(1, 48)", "(1, 32)")

    def test_run_of_another_model(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
        arguments = tiny_run.arguments("warm-start", root)
        refuse(replaced(arguments, "bert.BertConfig.mlp_size", 48), "use another")

    def test_too_long_a_warmup_is_not_blamed_on_gin(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        name = "warm_start/optimizers.OptimizerConfig.warmup_steps"
        arguments = replaced(tiny_run.arguments("warm-start", root), name, 99)
        assert "configurable" not in refuse(arguments, "99")

    def test_damaged_index(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start", "pretrain")
        data = root / "pretrain" / "index" / "data"
        chunks = [path for path in data.rglob("c/**/*") if path.is_file()]
        assert chunks
        for chunk in chunks:
            chunk.write_bytes(flipped(chunk.read_bytes()))
        checkpoints = files_below(root / "pretrain" / "checkpoints")
        refuse(more_steps(root), data, "as it was committed", "made anew")
        assert files_below(root / "pretrain" / "checkpoints") == checkpoints

    def test_index_of_another_corpus(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start", "pretrain")
        for commit in (root / "pretrain" / "index" / "commits").glob("*.json"):
            manifest = json.loads(commit.read_text())
            manifest["corpus_fingerprint"] = "0" * 64
            commit.write_text(json.dumps(manifest))
        refuse(more_steps(root), "corpus")

    @pytest.mark.full
    def test_full_disk(self, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        done = run_program(
            ["realm_jax.cli.main", *tiny_run.arguments("warm-start", root)],
            largest_file=10_000,
        )
        assert done.returncode == 2, done.stderr
        assert "full" in only_line(done.stderr)
        # No manifest, no checkpoint: the same command starts anew.
        assert not list((root / "warm_start").glob("checkpoints/*.json"))


class TestEvaluate:
    def test_stage_that_was_not_run(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus")
        refuse(tiny_run.arguments("evaluate", root), f"{root}/warm_start", "first")
        assert not (root / "evaluate").exists()

    def test_missing_questions(self, refuse, finished):
        arguments = tiny_run.arguments("evaluate", finished, QUESTIONS="none.jsonl")
        refuse(arguments, "none.jsonl")

    def test_a_control_without_what_it_is_compared_with(self, refuse, inputs):
        control = {"PRETRAINED": "", "CONTROL_WARM_STARTED": f"{inputs}/control"}
        arguments = tiny_run.arguments("evaluate", inputs, **control)
        refuse(arguments, "expected PRETRAINED beside CONTROL_WARM_STARTED")
        assert not (inputs / "evaluate").exists()


class TestAsk:
    def test_model_that_was_not_trained(self, refuse, finished, tmp_path):
        root = tiny_run.copy(finished, tmp_path, "corpus", "pretrain")
        arguments = [*tiny_run.arguments("ask", root), '--gin.QUESTION="who"']
        refuse(arguments, f"{root}/finetune", "first")
        assert not (root / "finetune").exists()

    def test_question_and_port(self, refuse, finished):
        arguments = tiny_run.arguments("ask", finished, QUESTION="who")
        refuse([*arguments, "--gin.PORT=8000"], "QUESTION", "PORT")
        refuse(tiny_run.arguments("ask", finished, QUESTION=" "), "question")

    def test_port_in_use(self, refuse, finished):
        arguments = tiny_run.arguments("ask", finished)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            refuse([*arguments, f"--gin.PORT={port}"], f"127.0.0.1:{port}", "in use")
        refuse([*arguments, "--gin.PORT=99999"], "99999")
        refuse([*arguments, "--gin.PORT='8000'"], "PORT", "without quotes", "'8000'")
        nowhere = [*arguments, "--gin.PORT=8000", '--gin.HOST="192.0.2.1"']
        refuse(nowhere, "192.0.2.1", "HOST")
        refuse([*arguments, "--gin.ALLOWED_HOSTS='box'"], "ALLOWED_HOSTS", "'box'")

    def test_no_model_file(self, refuse, finished):
        for command in ("ask", "finetune", "evaluate"):
            arguments = tiny_run.arguments(command, finished)
            kept = [word for word in arguments if "gin/models/" not in word]
            sizes = f"--gin_file={finished}/sizes.gin"
            kept.remove(sizes)
            refuse(kept, "--gin_file=gin/models/")

    def test_other_lengths_are_named_one_by_one(self, refuse, finished):
        arguments = tiny_run.arguments("ask", finished, QUESTION="who")
        other = replaced(arguments, "finetune/initialization.Lengths.document", 41)
        line = refuse(other, "lengths.document 41", "got 40")
        assert "{" not in line

    def test_another_corpus_than_was_trained_on(self, refuse, finished, tmp_path):
        other_corpus(finished, tmp_path)
        corpus = str(tmp_path / "corpus")
        arguments = tiny_run.arguments("ask", finished, CORPUS=corpus, QUESTION="who")
        refuse(arguments, "corpus_fingerprint", f"{finished}/finetune")


def run_program(arguments, largest_file=None):
    """Runs `python -m …`, perhaps where no file can grow beyond so many bytes."""

    def limit():
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    # Compiled programs are files, too, and half of one must not stay.
    uncached = {} if largest_file is None else compiled.NOT_CACHED
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        check=False,
        cwd=tiny_run.ROOT,
        env=tiny_run.environment() | uncached,
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=limit,
    )


def more_steps(root):
    """Goes on with a finished pre-training, which first loads its index."""
    arguments = tiny_run.arguments("pretrain", root)
    return replaced(arguments, "pretrain.PretrainConfig.train_steps", 16)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def other_corpus(finished, root):
    """Builds root/corpus of other text in the same vocabulary."""
    source = open_source(str(finished / "articles.jsonl"))
    documents = list(read_all(source))[:40]
    build_corpus(
        documents,
        root / "corpus",
        vocabulary=WordPiece.load(finished / "corpus" / "vocab.txt"),
        tagger=RuleTagger(),
        chunk_length=40,
    )
