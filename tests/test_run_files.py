"""Every run file composes with every model and hardware file."""

import dataclasses
import itertools
import re

from realm_jax import run_record
from realm_jax.stages import STAGES
from realm_jax.training.initialization import Lengths
from realm_jax.training.warm_start import frozen_parameters
from tests import tiny_run
from tests.cli.chains import configs_of, configuration_of, stages_of

# Chain -> padded lengths of training on sentences, and on questions.
CHAINS = {
    "quickstart": (Lengths(64, 96, 112), Lengths(40, 96, 112)),
    "from_nothing": (Lengths(64, 96, 128), Lengths(64, 96, 128)),
}
RUNS = tiny_run.GIN / "runs"
MODELS = sorted(
    path for path in (tiny_run.GIN / "models").glob("*.gin") if path.stem != "common"
)
HARDWARE = sorted((tiny_run.GIN / "hardware").glob("*.gin"))
WITH_MODELS = [stage for stage in tiny_run.CHAIN if stage != "prepare"]


def read(stage, files, root, *more):
    """Returns the configuration of a command that is given tiny_run's macros."""
    return configuration_of(stage, files, [*tiny_run.bindings(stage, root), *more])


def run_file(stage):
    return RUNS / f"{stage.replace('-', '_')}.gin"


def test_no_run_file_is_left_out():
    files = {path.stem for path in RUNS.glob("*.gin")}
    of_stages = {run_file(name).stem for name, spec in STAGES.items() if spec.config}
    others = {"quickstart_control", "pretrain_paper", "finetune_orqa"}
    assert files == of_stages | {*CHAINS, *others}


def test_no_run_file_promises_a_figure_that_was_not_seen():
    """What was seen stands in the results; else the settings are said to be unknown."""
    for path in RUNS.glob("*.gin"):
        header, *_ = re.split(r"\n(?:from __gin__|include)", path.read_text())
        _, _, expected = header.partition("Expect:")
        if "%" in expected:
            seen = "docs/results.md" in expected or expected.startswith(" unknown")
            assert seen, path


def test_orqas_fine_tuning_is_orqas(tmp_path):
    """ORQA, section 7.2, and the flags and schedule of its published code."""
    config = read("finetune", [MODELS[0], run_file("finetune-orqa")], tmp_path)
    assert config.train_steps == 2 * 79_168
    assert config.batch_size == 1
    assert (config.num_retrieved, config.num_read, config.max_span) == (5000, 5, 10)
    assert config.marginalization == "joint_softmax"
    assert config.models.lengths == Lengths(64, 288, 320)
    optimizer = config.optimizer(total_steps=config.train_steps)
    assert (optimizer.learning_rate, optimizer.warmup) == (1e-5, 10_000)


def test_stages_compose_with_every_model_and_hardware(tmp_path):
    for stage, model, hardware in itertools.product(WITH_MODELS, MODELS, HARDWARE):
        config = read(stage, [model, hardware, run_file(stage)], tmp_path)
        bert = config.models.retriever_config(vocab_size=30522).bert
        wanted = "float32" if hardware.stem == "cpu" else "bfloat16"
        assert bert.dtype == wanted, (stage, model.stem, hardware.stem)
        assert bert.max_positions >= config.models.lengths.joined
        assert config.corpus == f"{tmp_path}/corpus"
        if stage != "evaluate":
            assert config.optimizer(total_steps=config.train_steps).learning_rate > 0


def test_ask_reads_a_model_as_it_was_fine_tuned(tmp_path):
    for model, hardware in itertools.product(MODELS, HARDWARE):
        finetuned, asked = (
            read(stage, [model, hardware, run_file(stage)], tmp_path)
            for stage in ("finetune", "ask")
        )
        assert asked.corpus == f"{tmp_path}/corpus"
        assert asked.finetuned.model_dir == f"{tmp_path}/finetune"
        assert asked.finetuned.models.lengths == finetuned.models.lengths
        answering = finetuned.answering()
        assert asked.finetuned.answering().reading() == answering.reading()
        assert asked.finetuned.num_read == finetuned.num_read
        assert asked.finetuned.retrieval_weight == finetuned.retrieval_weight == 1.0
        assert asked.embed == finetuned.embed


def test_corpora_and_build_index_need_no_model_file(tmp_path):
    assert read("prepare", [run_file("prepare")], tmp_path).name == "towns"
    update = read("update-corpus", [run_file("update-corpus")], tmp_path)
    assert update.output == f"{tmp_path}/corpus2"
    for hardware in HARDWARE:
        config = read("build-index", [hardware, run_file("build-index")], tmp_path)
        assert config.model_dir == f"{tmp_path}/pretrain"


def test_stages_of_one_chain_agree_on_lengths(tmp_path):
    prepared = read("prepare", [run_file("prepare")], tmp_path)
    for stage in ("warm-start", "pretrain"):
        files = [MODELS[0], HARDWARE[0], run_file(stage)]
        lengths = read(stage, files, tmp_path).models.lengths
        assert lengths.query >= prepared.query_length
        assert lengths.document == prepared.chunk_length


def test_the_embedding_that_hardware_asks_for_reaches_every_stage(tmp_path):
    for hardware, batch_size in {"cpu": 32, "tpu": 2048}.items():
        for stage in WITH_MODELS:
            path = tiny_run.GIN / "hardware" / f"{hardware}.gin"
            config = read(stage, [MODELS[0], path, run_file(stage)], tmp_path)
            assert config.embed.batch_size == batch_size, (hardware, stage)


def test_the_mixture_of_a_warm_start_is_what_its_macros_say(tmp_path):
    files = [MODELS[0], run_file("warm-start")]
    config = read("warm-start", files, tmp_path, "PAIRS_TASK=")
    assert config.mixture.shares == (1.0, 0.0, 0.0)
    assert not config.reads_retrieved
    # Of the models, the one without a task stays as it is.
    assert frozen_parameters(config) == ("retriever",)
    mixture = ("OWN=0.5", "NULL=0.2", "RETRIEVED=0.3")
    config = read("warm-start", files, tmp_path, *mixture)
    assert config.mixture.shares == (0.5, 0.2, 0.3)
    assert config.reads_retrieved


def test_the_papers_run_is_the_papers(tmp_path):
    """REALM, section 4 and appendix; the hardware file comes last."""
    for hardware in HARDWARE:
        config = read("pretrain", [run_file("pretrain-paper"), hardware], tmp_path)
        towers = config.models.retriever_config(vocab_size=30522)
        bert = towers.bert
        sizes = (bert.num_layers, bert.hidden_size, bert.num_heads, bert.mlp_size)
        assert sizes == (12, 768, 12, 3072)
        assert not towers.shared
        assert towers.projection_size == 128
        assert (config.batch_size, config.num_candidates) == (512, 8)
        assert config.train_steps == 200_000
        assert config.refresh_period == 500
        assert config.models.lengths == Lengths(96, 288, 384)
        assert config.optimizer(total_steps=200_000).learning_rate == 3e-5
        assert bert.dtype == ("float32" if hardware.stem == "cpu" else "bfloat16")


def test_chains_read_for_every_stage():
    for name, (lengths, of_questions) in CHAINS.items():
        configs = configs_of(run_file(name))
        assert list(configs) == list(tiny_run.CHAIN)
        assert {config.corpus for config in configs.values()} == {f"runs/{name}/corpus"}
        _, _, pretrain, finetune, evaluate = configs.values()
        for config in (pretrain, evaluate):
            assert config.models.lengths == lengths
        for config in (finetune, evaluate.finetuned):
            assert config.models.lengths == of_questions
        for config in (pretrain, finetune, evaluate):
            assert config.embed.shard_blocks == 2048


def test_the_control_is_the_quickstart_without_realm():
    """Whatever the quickstart binds; each stage may differ in what is named here."""
    quickstart, control = (
        {
            # As long as gin holds what its factories bind.
            stage.command: (stage, run_record.settings_of(config))
            for stage, _, config in stages_of(run_file(name))
        }
        for name in ("quickstart", "quickstart_control")
    )
    assert list(control) == ["warm-start", "finetune", "evaluate"]
    warm_started = "runs/quickstart_control/warm_start"
    steps = control["warm-start"][1]["train_steps"]
    optimizer = quickstart["warm-start"][1]["optimizer"]
    may_differ = {
        "warm-start": {
            "model_dir": warm_started,
            "warm_start": "runs/quickstart/warm_start",
            "train_steps": steps,
            "optimizer": optimizer | {"total_steps": steps},
            "seed": 1,
        },
        "finetune": {
            "model_dir": "runs/quickstart_control/finetune",
            "warm_start": warm_started,
        },
        "evaluate": {
            "model_dir": "runs/quickstart_control/evaluate",
            "control_warm_started": warm_started,
            "control_finetuned": "runs/quickstart_control/finetune",
            "title": control["evaluate"][1]["title"],
        },
    }
    for command, differences in may_differ.items():
        (stage, values), (other_stage, expected) = (
            chain[command] for chain in (control, quickstart)
        )
        assert values == expected | differences, command
        assert dataclasses.replace(stage, bindings=other_stage.bindings) == other_stage


def test_how_long_the_control_goes_on_is_a_macro(tmp_path):
    files = [MODELS[0], run_file("warm-start"), run_file("quickstart_control")]
    config = read("warm-start", files, tmp_path, "CONTROL_STEPS=70")
    assert config.train_steps == 70


def test_what_the_quickstart_trained_can_be_asked(tmp_path):
    files = [tiny_run.GIN / "models/minilm_l6.gin", tiny_run.GIN / "hardware/cpu.gin"]
    asked, finetuned = (
        read(stage, [*files, run_file(stage), run_file("quickstart")], tmp_path)
        for stage in ("ask", "finetune")
    )
    assert asked.finetuned.models.lengths == finetuned.models.lengths
    assert asked.embed == finetuned.embed
    towers = asked.finetuned.models.retriever_config(100)
    assert towers.temperature > 1.0
    assert towers == finetuned.models.retriever_config(100)
