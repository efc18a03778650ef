"""Gin files and command lines become configurations."""

import logging

import pytest

from realm_jax import run_record
from realm_jax.cli import bert_settings, configuration
from tests import tiny_run
from tests.cli.chains import configuration_of
from tests.refused import refused

# In a folder of the package, which gin finds after two that lack it.
SHIPPED = "hardware/cpu.gin"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads gin files as the command line of a run does."""
    monkeypatch.chdir(tmp_path)
    parser = configuration.make_parser("realm pretrain", "")
    return lambda *files: configuration.parse(
        parser, [f"--gin_file={file}" for file in files]
    )


def test_folders_without_the_file_are_not_logged(read, caplog):
    with caplog.at_level(logging.DEBUG):
        read(SHIPPED)
    assert "not found" not in caplog.text


def test_the_root_logger_is_left_alone(read, tmp_path, monkeypatch, caplog):
    """Also while gin reads, for it imports modules, which may log."""
    (tmp_path / "talkative.py").write_text("import logging\nlogging.info('here')\n")
    (tmp_path / "mine.gin").write_text(
        "from __gin__ import dynamic_registration\nimport talkative\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.INFO):
        read("mine.gin", SHIPPED)
        assert logging.getLogger().level == logging.INFO
    assert "here" in caplog.messages


CHAIN_FILE = """
STEPS = 9
pretrain/WAIT_SECONDS = 60.0
pretrain/TRAIN_STEPS = 7
pretrain/BATCH_SIZE = %STEPS
finetune/TRAIN_STEPS = 5
LEARNING_RATE = 0.5
"""
NO_EFFECT = "no effect on `realm pretrain`"
REQUIRED = ["MODEL_DIR=m", "CORPUS=c", "TASK=t", "WARM_START=w"]


@pytest.fixture
def configured(tmp_path):
    """Reads a training command's run file and a chain's file; returns the settings."""
    (tmp_path / "chain.gin").write_text(CHAIN_FILE)

    def read(command, *bindings):
        files = ["models/tiny.gin", f"runs/{command}.gin", f"{tmp_path}/chain.gin"]
        return configuration_of(command, files, [*REQUIRED, *bindings])

    return read


def test_a_macro_of_a_command_is_before_that_of_all_and_the_command_line_before_both(
    configured,
):
    for command, bindings, expected in (
        ("pretrain", [], (7, 9)),
        ("finetune", [], (5, 16)),
        ("pretrain", ["TRAIN_STEPS=3"], (3, 9)),
        ("pretrain", ["pretrain/TRAIN_STEPS=3"], (3, 9)),
        ("pretrain", ["pretrain/TRAIN_STEPS=3", "TRAIN_STEPS=4"], (3, 9)),
        ("pretrain", ["STEPS=4"], (7, 4)),
    ):
        config = configured(command, *bindings)
        assert (config.train_steps, config.batch_size) == expected, bindings
        assert config.optimizer(total_steps=100).learning_rate == 0.5


def test_a_field_without_a_macro_is_set_by_the_name_of_one(configured):
    assert configured("pretrain").wait_seconds == 60.0
    of_stage, of_all = "pretrain/WAIT_SECONDS=5", "WAIT_SECONDS=6"
    for bindings in (["WAIT_SECONDS=5"], [of_stage], [of_stage, of_all]):
        config = configured("pretrain", "QUESTIONS_SPLIT=train", *bindings)
        assert (config.wait_seconds, config.questions_split) == (5, "train")
    assert configured("pretrain", of_all, of_stage).wait_seconds == 5


@pytest.mark.parametrize(
    ("command", "binding", "said"),
    [
        ("finetune", "WAIT_SECONDS=5", "unknown macro 'WAIT_SECONDS'"),
        ("pretrain", "WAIT_SECONDS=soon", "wait_seconds to be a number, got soon"),
        ("pretrain", "BATCH_SIZE=many", "BATCH_SIZE to be an integer"),
        # Of another command.
        ("pretrain", "finetune/TRAIN_STEPS=3", NO_EFFECT),
        ("pretrain", "finetune.FinetuneConfig.num_read=3", NO_EFFECT),
        # Its scope is not read, or another that is.
        ("pretrain", "optimizers.OptimizerConfig.learning_rate=1.0", NO_EFFECT),
        ("pretrain", "other/optimizers.OptimizerConfig.learning_rate=1.0", NO_EFFECT),
    ],
)
def test_bindings_of_no_use_are_refused(configured, command, binding, said):
    configured("finetune")  # Each exists; only nothing reads it.
    with refused(said):
        configured(command, binding)


def test_a_macro_that_is_misspelt_in_a_file_is_refused(configured, tmp_path):
    (tmp_path / "chain.gin").write_text("pretrain/TRIAN_STEPS = 7\n")
    with refused("TRIAN_STEPS"):
        configured("pretrain")


class TestWhatIsRead:
    def test_by_the_builder_is_what_its_trainer_is_given(self):
        files = ["models/tiny.gin", "runs/pretrain.gin", "runs/build_index.gin"]
        given = [*REQUIRED, "TRAIN_STEPS=3", "pretrain/BATCH_SIZE=3"]
        assert configuration_of("build-index", files, given).corpus == "c"

    def test_by_parts_of_the_configuration_takes_effect(self, configured):
        before = run_record.settings_of(configured("pretrain"))
        for binding in (
            "pretrain/optimizers.OptimizerConfig.weight_decay=0.1",
            "bert.BertConfig.layer_norm_epsilon=1e-3",
            "pretrain.PretrainConfig.write_back=True",
            "DTYPE=bfloat16",
            "QUERY_LENGTH=8",
        ):
            after = run_record.settings_of(configured("pretrain", binding))
            (change,) = run_record.changes(before, after)
            found, value = str(change.second), binding.partition("=")[2]
            assert found == value or float(found) == float(value)

    def test_by_a_configurable_of_ones_own_counts(
        self, configured, tmp_path, monkeypatch
    ):
        (tmp_path / "own_settings.py").write_text("def mine(size=1): return size\n")
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "chain.gin").write_text(
            "from __gin__ import dynamic_registration\n"
            "import own_settings\nown_settings.mine.size = 2\n"
        )
        configured("pretrain", "own_settings.mine.size=3")


class TestTexts:
    def test_need_no_quotes_where_one_is_expected(self, configured):
        for given in ("runs/my corpus", "1984", "True", ""):
            assert configured("pretrain", f"QUESTIONS={given}").questions == given
        quoted = configured("pretrain", 'QUESTIONS="runs/quoted"')
        assert quoted.questions == "runs/quoted"
        parser = configuration.make_parser("status", "")
        for text in ("runs/my", '"runs/my"'):
            given = [f"--gin.MODEL_DIR={text}"]
            _, value = configuration.parse_for_macro(parser, given, "MODEL_DIR")
            assert value == "runs/my"

    def test_are_expected_of_a_macro_by_what_reads_another_that_is_it(
        self, configured, tmp_path
    ):
        (tmp_path / "chain.gin").write_text("PLACE = None\nQUESTIONS = %PLACE\n")
        assert configured("pretrain", "PLACE=runs/my text").questions == "runs/my text"

    def test_numbers_and_others_stay_what_they_are(self, configured):
        config = configured("pretrain", "MAX_STALENESS_STEPS=3", "OWN_BLOCK=True")
        assert config.max_staleness_steps == 3
        assert config.own_block is True
        config = configured("pretrain", "MAX_STALENESS_STEPS=None")
        assert config.max_staleness_steps is None


def test_macros_that_are_each_other_have_no_reader(configured, tmp_path):
    (tmp_path / "chain.gin").write_text("ONE = %OTHER\nOTHER = %ONE\n")
    with refused("ONE has no effect"):
        configured("pretrain", "ONE=3")


def test_a_folder_of_the_name_hides_no_run_file(configured, tmp_path, monkeypatch):
    """As runs/, which the quickstart makes."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert configured("pretrain").corpus == "c"


def test_an_undecided_rematerialization_is_said_before_anything_is_opened(
    tmp_path, refuse
):
    """remat="auto" is a word of gin files, and the planner decides it."""
    for command in ("warm-start", "pretrain", "finetune", "evaluate", "ask"):
        run, model = (
            tiny_run.GIN / file
            for file in (f"runs/{command.replace('-', '_')}.gin", "models/tiny.gin")
        )
        macros = [f"--gin.{one}" for one in tiny_run.bindings(command, tmp_path)]
        auto = '--gin.bert.BertConfig.remat="auto"'
        files = [f"--gin_file={run}", f"--gin_file={model}"]
        said = 'expected a decision for remat="auto", got none'
        refuse([command, *files, *macros, auto], said, "bert.BertConfig.remat to none")


def test_which_rematerialization_is_undecided(read, tmp_path):
    for text, undecided in (
        ('bert.BertConfig.remat = "auto"', True),
        ('bert.BertConfig.remat = %REMAT\nREMAT = "auto"', True),
        ('bert.BertConfig.remat = "auto"\nbert.BertConfig.remat = "dots"', False),
        ('bert.BertConfig.products = "auto"', False),
        ("", False),
    ):
        (tmp_path / "mine.gin").write_text(
            "from __gin__ import dynamic_registration\n"
            f"from realm_jax.models import bert\n{text}"
        )
        read("mine.gin")
        assert bert_settings.remat_is_undecided() == undecided, text
