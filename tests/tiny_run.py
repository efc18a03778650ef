"""The whole chain in seconds: sixty invented articles and a model of one layer of 16.

The run files are those of gin/; only sizes are taken down, by one file given last, as a
person would do it. `python -m tests.tiny_run FOLDER` runs the chain in one process.
"""

import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import pytest

from realm_jax.cli import configuration
from realm_jax.cli.main import main
from realm_jax.evaluation.ask import AnswerService, AskConfig
from tests.json_lines import write_lines

ROOT = pathlib.Path(__file__).parents[1]
GIN = ROOT / "gin"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
CHAIN = ("prepare", "warm-start", "pretrain", "finetune", "evaluate")

_ARTICLE = (
    "Town{i} was founded in {year} by Karel Dorm. Town{i} has {i} mills. Maria Brel "
    "drew it on 16 February {drawn}. The river Fosk is near Town{i}. In {burnt} the "
    "town burnt down. It was not built again."
)

_SIZES = """
from __gin__ import dynamic_registration

from realm_jax.cli import build_index
from realm_jax.evaluation import run
from realm_jax.index import builder
from realm_jax.index import embed
from realm_jax.models import bert
from realm_jax.models import retriever
from realm_jax.training import finetune
from realm_jax.training import initialization
from realm_jax.training import optimizers
from realm_jax.training import pretrain
from realm_jax.training import warm_start
from realm_jax.prepare import prepare

prepare.PrepareConfig:
    chunk_length = 40
    query_length = 32
    inverse_cloze_query_length = 32
    max_masks = 6
    vocabulary_size = 300
    validation_fraction = 0.2
    tagger = "rules"

bert.BertConfig:
    hidden_size = 16
    num_layers = 1
    num_heads = 2
    mlp_size = 32
    max_positions = 128
    dropout_rate = 0.0
retriever.RetrieverConfig:
    projection_size = 8
    projection_dropout = 0.0
initialization.Lengths:
    query = 32
    document = 40
    joined = 72
pretrain/initialization.Lengths:
    query = 32
    document = 40
    joined = 72
finetune/initialization.Lengths:
    query = 32
    document = 40
    joined = 72
embed.EmbedConfig:
    document_length = 40
    batch_size = 64
    shard_blocks = 64
builder.BuilderConfig.poll_seconds = 0.05
pretrain.PretrainConfig.embed = @embed.EmbedConfig()
finetune.FinetuneConfig.embed = @embed.EmbedConfig()
run.EvaluateConfig.embed = @embed.EmbedConfig()

warm_start/optimizers.OptimizerConfig.warmup_steps = 1
pretrain/optimizers.OptimizerConfig.warmup_steps = 1
finetune/optimizers.OptimizerConfig.warmup_steps = 1
warm_start.WarmStartConfig:
    train_steps = 4
    batch_size = 4
    log_period = 2
pretrain.PretrainConfig:
    train_steps = {pretrain_steps}
    batch_size = 4
    num_candidates = 3
    refresh_period = {refresh_period}
    log_period = 2
    checkpoint_period = 100
finetune.FinetuneConfig:
    train_steps = 3
    batch_size = 4
    num_retrieved = 20
    num_read = 2
    log_period = 2
run.EvaluateConfig:
    num_candidates = 3
    max_masked = 8
"""

# Stage -> its macros beside CORPUS; {root} is the folder of the run.
STAGES: Mapping[str, Mapping[str, str]] = {
    "prepare": {
        "SOURCE": "{root}/articles.jsonl",
        "NAME": "towns",
        "QUESTIONS": "{root}/questions.jsonl",
    },
    "update-corpus": {
        "CHANGES": "{root}/changes.jsonl",
        "OUTPUT": "{root}/corpus2",
    },
    "warm-start": {
        "MODEL_DIR": "{root}/warm_start",
        "TASK": "towns_salient",
        "PAIRS_TASK": "towns_ict",
    },
    "pretrain": {
        "MODEL_DIR": "{root}/pretrain",
        "TASK": "towns_salient",
        "WARM_START": "{root}/warm_start",
        "QUESTIONS": "{root}/questions.jsonl",
    },
    "build-index": {"MODEL_DIR": "{root}/pretrain"},
    "finetune": {
        "MODEL_DIR": "{root}/finetune",
        "TASK": "towns_questions",
        "WARM_START": "{root}/pretrain",
    },
    "evaluate": {
        "MODEL_DIR": "{root}/evaluate",
        "QUESTIONS": "{root}/questions.jsonl",
        "WARM_STARTED": "{root}/warm_start",
        "PRETRAINED": "{root}/pretrain",
        "FINETUNED": "{root}/finetune",
        "MASKED_TASK": "towns_salient",
    },
    "ask": {"FINETUNED": "{root}/finetune", "PRETRAINED": "{root}/pretrain"},
}


def make_inputs(root: pathlib.Path, *, num_articles: int = 60) -> None:
    """Writes articles.jsonl, questions.jsonl and sizes.gin below `root`."""
    articles = [
        {
            "id": f"town-{i}",
            "title": f"Town{i}",
            "text": _ARTICLE.format(i=i, year=1200 + i, drawn=1500 + i, burnt=1700 + i),
        }
        for i in range(num_articles)
    ]
    questions = [
        {
            "id": f"question-{i}",
            "question": f"When was Town{i} founded?",
            "answers": [str(1200 + i)],
            "title": f"Town{i}",
            "topic": "towns",
            "split": ("train", "dev", "test")[i % 3],
        }
        for i in range(num_articles)
    ]
    write_lines(root / "articles.jsonl", articles)
    write_lines(root / "questions.jsonl", questions)
    write_sizes(root)


def write_sizes(
    root: pathlib.Path, *, pretrain_steps: int = 12, refresh_period: int = 4
) -> None:
    """Writes sizes.gin, which takes every run file down to a few steps."""
    text = _SIZES.format(pretrain_steps=pretrain_steps, refresh_period=refresh_period)
    (root / "sizes.gin").write_text(text)


def gin_files(stage: str) -> list[str]:
    """The model, hardware and run file of a stage, as its header names them."""
    run = str(GIN / "runs" / f"{stage.replace('-', '_')}.gin")
    hardware = str(GIN / "hardware" / "cpu.gin")
    if stage in ("prepare", "update-corpus"):
        return [run]
    model = [] if stage == "build-index" else [str(GIN / "models" / "tiny.gin")]
    return [*model, hardware, run]


def bindings(stage: str, root: pathlib.Path, **others: str) -> list[str]:
    """MACRO=value of a stage, quoted for gin; `others` replace or add string macros."""
    macros = {name: value.format(root=root) for name, value in STAGES[stage].items()}
    macros["CORPUS"] = f"{root}/corpus"
    return [f'{name}="{value}"' for name, value in {**macros, **others}.items()]


def arguments(stage: str, root: pathlib.Path, **others: str) -> list[str]:
    """What a person types after `realm` to run a stage on the tiny inputs."""
    files = [*gin_files(stage), str(root / "sizes.gin")]
    return [
        stage,
        *(f"--gin_file={file}" for file in files),
        *(f"--gin.{binding}" for binding in bindings(stage, root, **others)),
    ]


def write_chain(
    root: pathlib.Path,
    stages: Sequence[str],
    *,
    processes: int = 1,
    model_dir: str | None = None,
) -> pathlib.Path:
    """Writes chain.gin for `python -m tpu_launch local`; returns its path.

    `processes` and `model_dir` are those of `pretrain`.
    """
    elsewhere = {} if model_dir is None else {"MODEL_DIR": model_dir}
    names = [stage.replace("-", "_") for stage in stages]
    text = (root / "sizes.gin").read_text() + "\nfrom tpu_launch import local\n"
    text += f"local.Chain:\n    root = {str(root)!r}\n    stages = ["
    text += ", ".join(f"@{name}/local.Stage()" for name in names) + "]\n"
    for name, stage in zip(names, stages, strict=True):
        fields = {"command": stage, "gin_files": gin_files(stage)}
        if stage != "pretrain":
            fields["bindings"] = bindings(stage, root)
        else:
            fields["bindings"] = bindings(stage, root, **elsewhere)
            fields |= {"processes": processes, "companion": "build-index"}
            fields["companion_gin_files"] = gin_files("build-index")
            fields["companion_bindings"] = bindings("build-index", root, **elsewhere)
        text += f"{name}/local.Stage:\n"
        text += "".join(f"    {name} = {value!r}\n" for name, value in fields.items())
    path = root / "chain.gin"
    path.write_text(text)
    return path


def environment() -> dict[str, str]:
    return os.environ | ENVIRONMENT


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Starts `python -m …` as a person would, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def launch(chain: pathlib.Path) -> subprocess.Popen[str]:
    return start(["tpu_launch", "local", f"--gin_file={chain}"])


# What the shared chain trains longer than others: its models tell towns apart, so that
# no two answers to a question are as good as each other.
_LONGER: Mapping[str, Mapping[str, object]] = {
    "warm-start": {
        "warm_start.WarmStartConfig.train_steps": 60,
        "warm_start.WarmStartConfig.batch_size": 16,
        "warm_start/optimizers.OptimizerConfig.learning_rate": 1e-2,
    },
    "finetune": {
        "finetune.FinetuneConfig.train_steps": 20,
        "finetune/optimizers.OptimizerConfig.learning_rate": 1e-2,
    },
}


def chain_arguments(stage: str, root: pathlib.Path) -> list[str]:
    # A builder beside it would commit whenever the machine lets it, and every run
    # would end with another model.
    others = {"REFRESH_MODE": "blocking"} if stage == "pretrain" else {}
    longer = [f"--gin.{name}={value}" for name, value in _LONGER.get(stage, {}).items()]
    return arguments(stage, root, **others) + longer


def run_chain(root: pathlib.Path) -> None:
    """Runs all stages in this process, one after the other."""
    make_inputs(root)
    for stage in CHAIN:
        code = main(chain_arguments(stage, root))
        assert code == 0, f"{stage}: exit code {code}"


def finished(factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns the folder of a chain that was run to its end, once a session; read only.

    It has the same bits in every session on one machine. A failure is remembered, so
    that every test that needs the chain names its cause.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # All workers of the session share it.
    root, said = base / "finished", base / "finished.json"
    with (base / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            root.mkdir()
            chain = start(["tests.tiny_run", str(root)])
            output, _ = chain.communicate()
            said.write_text(json.dumps([chain.returncode, output]))
    code, output = json.loads(said.read_text())
    assert code == 0, output
    return root


def ask_config(root: pathlib.Path) -> AskConfig:
    """Returns the configuration that the run files give `realm ask`."""
    words = arguments("ask", root)[1:]
    configuration.parse(configuration.make_parser("realm ask", ""), words)
    return configuration.configured(AskConfig)


def answered(root: pathlib.Path, count: int) -> dict[str, str]:
    """Returns the first test questions with their answers.

    Each was asked by itself, as every way of asking does. Evaluation asks in batches;
    where two answers are as good as each other, rounding may choose the other there.
    """
    lines = (root / "questions.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    questions = [one["question"] for one in asked if one["split"] == "test"][:count]
    service = AnswerService(ask_config(root), threading.Event())
    return {question: service.answer(question).answer.text for question in questions}


def copy(source: pathlib.Path, root: pathlib.Path, *folders: str) -> pathlib.Path:
    """Copies the inputs and some folders of a run, to go on from there."""
    for name in ("articles.jsonl", "questions.jsonl", "sizes.gin"):
        shutil.copy(source / name, root / name)
    for folder in folders:
        shutil.copytree(source / folder, root / folder)
    return root


if __name__ == "__main__":
    run_chain(pathlib.Path(sys.argv[1]))
