"""Stock `t5x.train` runs every stage on eight devices; skipped without T5X."""

import importlib.util

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import realm_jax
from realm_jax.errors import BadInputError
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.storage import open_store
from tests import tiny_run, tiny_world

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("t5x") is None,
        reason="T5X is not on the path, see docs/t5x.md",
    ),
]

SIZES = """
from __gin__ import dynamic_registration

from realm_jax.index import embed
from realm_jax.models import bert
from realm_jax.models import retriever
from t5x import partitioning

bert.BertConfig:
    hidden_size = 16
    num_layers = 1
    num_heads = 2
    mlp_size = 32
    max_positions = 40
retriever.RetrieverConfig.projection_size = 8
embed.EmbedConfig:
    batch_size = 8
    shard_blocks = 8
QUERY_LENGTH = 10
DOCUMENT_LENGTH = 28
JOINED_LENGTH = 34
SHARED_TOWERS = False
BATCH_SIZE = 8
LEARNING_RATE = 1e-2
WARMUP_STEPS = 0
LOG_PERIOD = 5
# Four devices along "data", two along "model".
partitioning.PjitPartitioner:
    num_partitions = None
    model_parallel_submesh = (1, 2)
"""
TASKS = {"ict": "PAIRS_TASK='pairs'", "pretrain": "TASK='asked'"}
TASKS["finetune"] = "TASK='questions'"


def finished(process, name):
    output, _ = process.communicate()
    assert process.returncode == 0, f"{name}: {output[-5000:]}"


def started(stage, root, *bindings):
    """Starts a stage as docs/t5x.md says."""
    files = [tiny_run.GIN / "models" / "tiny.gin", f"gin/t5x/{stage}.gin"]
    places = [f"MODEL_DIR='{root / stage}'", f"CORPUS='{root / 'corpus'}'"]
    return train([*files, root / "sizes.gin"], [*places, TASKS[stage], *bindings])


def train(files, macros):
    words = [f"--gin_file={file}" for file in files]
    words += [f"--gin.{macro}" for macro in macros]
    return tiny_run.start(["t5x.train", "--gin_search_paths=.", *words])


def scalars(folder, name):
    """The values of T5X's summaries by step."""
    events = EventAccumulator(str(folder / "train"), size_guidance={"tensors": 0})
    events.Reload()
    return {
        event.step: float(make_ndarray(event.tensor_proto))
        for event in events.Tensors(name)
    }


@pytest.fixture
def eight_devices(monkeypatch):
    eight = "--xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", eight, prepend=" ")


@pytest.mark.usefixtures("eight_devices")
def test_the_stages_run_and_answer(tmp_path):
    """ICT, 50 steps of REALM with two refreshes, fine-tuning: each from the last."""
    from realm_jax import t5x

    world = tiny_world.make(tmp_path)
    (tmp_path / "sizes.gin").write_text(SIZES)
    finished(started("ict", tmp_path, "TRAIN_STEPS=10"), "ict")
    assert t5x.make_model_directory(str(tmp_path / "ict")) == 10

    pretraining = started(
        "pretrain",
        tmp_path,
        f"WARM_START='{tmp_path / 'ict'}'",
        "TRAIN_STEPS=50",
        "REFRESH_PERIOD=20",
        # So that every refresh is waited for.
        "MAX_STALENESS_STEPS=20",
        "NUM_CANDIDATES=4",
    )
    builder = tiny_run.start(
        [
            "realm_jax.cli.main",
            "build-index",
            f"--gin_file={tiny_run.GIN / 'runs' / 'build_index.gin'}",
            f"--gin.MODEL_DIR={tmp_path / 'pretrain'}",
            f"--gin.CORPUS={tmp_path / 'corpus'}",
            "--gin.DOCUMENT_LENGTH=28",
        ]
    )
    finished(pretraining, "pretrain")
    finished(builder, "build-index")
    folder = tmp_path / "pretrain"
    ages = scalars(folder, "index_age_steps")
    assert [ages[step] for step in (20, 25, 40, 45)] == [20, 5, 20, 5]
    assert scalars(folder, "index_swaps")[50] == 2
    losses = scalars(folder, "loss")
    assert losses[50] < losses[5]
    assert SnapshotSeries(open_store(folder), INDEX_SERIES).steps()[-1] == 50
    assert t5x.make_model_directory(str(folder)) == 50

    macros = [f"WARM_START='{folder}'", "TRAIN_STEPS=10", "NUM_RETRIEVED=24"]
    finished(started("finetune", tmp_path, *macros, "NUM_READ=2"), "finetune")
    with pytest.raises(BadInputError, match="no checkpoint"):
        realm_jax.load(str(tmp_path / "finetune"))
    assert t5x.make_model_directory(str(tmp_path / "finetune")) == 10
    model = realm_jax.load(str(tmp_path / "finetune"))
    answer = model.answer("Who ?")
    assert answer.text in " ".join(document.text for document in answer.documents)
    assert world.corpus == str(model.corpus.directory)


BYTES = """
from __gin__ import dynamic_registration

import seqio
from t5x.examples.t5 import network

VOCABULARY = @seqio.ByteVocabulary()
network.T5Config.vocab_size = 384
"""


def test_a_t5_learns_the_questions_without_documents(tmp_path):
    tiny_run.make_inputs(tmp_path, num_articles=12)
    (tmp_path / "bytes.gin").write_text(BYTES)
    files = ("t5x/examples/t5/t5_1_1/tiny.gin", "gin/t5x/closed_book.gin")
    macros = [
        f"MODEL_DIR='{tmp_path / 'closed_book'}'",
        f"QUESTIONS='{tmp_path / 'questions.jsonl'}'",
        "INITIAL_CHECKPOINT_PATH=[]",
        "TRAIN_STEPS=2",
        "EVAL_PERIOD=2",
        "EVAL_STEPS=1",
        "BATCH_SIZE=4",
        "utils.SaveCheckpointConfig.period=2",
    ]
    finished(train([*files, tmp_path / "bytes.gin"], macros), "closed_book")
    folder = tmp_path / "closed_book" / "inference_eval"
    assert list(folder.glob("closed_book-metrics.jsonl"))
