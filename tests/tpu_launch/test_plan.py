"""What the planner says, against figures that were known without it."""

import dataclasses
import functools
import itertools
import json
import threading

import jax
import jax.numpy as jnp
import pytest

from realm_jax.cli import configuration
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.errors import StoppedError
from realm_jax.hardware import HardwareConfig
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import DeviceConfig
from realm_jax.models.bert import REMAT, BertConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.initialization import Lengths, ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.warm_start import ReaderMixture, WarmStartConfig
from tests import tiny_run, tiny_world
from tpu_launch import __main__ as tpu_launch
from tpu_launch.cancellation import unless_stopped
from tpu_launch.planner import commands, devices, memory, programs
from tpu_launch.planner.devices import Setting
from tpu_launch.slices import parse

GIB = 1 << 30
PAPER = CorpusSize()


def base(vocab_size, **changes):
    sizes = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "mlp_size": 3072}
    settings = {"dropout_rate": 0.1, "dtype": "bfloat16", **sizes, **changes}
    return BertConfig(vocab_size=vocab_size, **settings)


TOWERS = functools.partial(RetrieverConfig, shared=False)


def pretraining(config_class=PretrainConfig, *, bert=None, **changes):
    bert = {} if bert is None else bert
    settings = {
        "model_dir": "m",
        "corpus": "c",
        "task": "t",
        "train_steps": 200_000,
        "batch_size": 512,
        "models": ModelFactory(functools.partial(base, **bert), TOWERS),
        "optimizer": OptimizerConfig,
        **changes,
    }
    return config_class(**settings)


def on(trainer, builder="", corpus=PAPER, **changes):
    hardware = HardwareConfig(trainer, builder=builder, **changes)
    return Setting(corpus, hardware, False, lambda text: None)


BFLOAT16 = DeviceConfig("bfloat16", approximate=True)


@pytest.mark.parametrize(
    ("task", "pairs_task", "bytes_of_a_sentence"),
    [("t", "", 28), ("", "p", 9), ("t", "p", 37)],
)
def test_a_warm_start_has_the_examples_of_its_tasks(
    task, pairs_task, bytes_of_a_sentence
):
    config = pretraining(WarmStartConfig, task=task, pairs_task=pairs_task)
    examples = commands._examples(on("v4-64"), 288, config)
    sentences = examples.value / bytes_of_a_sentence
    # Wikipedia's blocks of 288 wordpieces, of 28 to a sentence.
    assert sentences == pytest.approx(13_353_718 * 288 / 28)


def test_a_builder_has_no_examples():
    models = ModelFactory(base, TOWERS)
    plan = commands.build_index(models, EmbedConfig(), on("v4-64", "v4-16"))
    names = [line.name for line in plan.sections["a host"]]
    assert names[:2] == ["the corpus on its disk", "on its disk, in all"]


@pytest.mark.parametrize(
    ("remat", "gib"), [("none", 45.8), ("attention", 18.9), ("dots", 13.8)]
)
def test_what_is_counted_is_what_the_compiler_found(remat, gib):
    """Of the paper's update on 64 cores of v3, compiled once and for all."""
    config = pretraining(bert={"remat": remat}, device=BFLOAT16)
    mesh = devices.mesh_of(on("v3-64"), config.mesh)
    counted = memory.counted(config, PAPER, mesh)
    assert counted.num_bytes / GIB == pytest.approx(gib, rel=0.1)


def test_the_papers_update_and_refresh_are_as_large_as_they_are_known_to_be():
    """1,203 TFLOP at 64, 288 and 352 wordpieces, 646 PFLOP to embed Wikipedia."""
    bert = functools.partial(base, remat="none")
    config = pretraining(models=ModelFactory(bert, TOWERS, Lengths(64, 288, 352)))
    plan = commands.training("pretrain", config, on("v3-64", "v3-32"))
    assert plan.figure("an update", "the model needs") == pytest.approx(
        1.203e15, rel=0.02
    )
    embedding = plan.figure("the index", "to embed them")
    assert embedding == pytest.approx(6.456e17, rel=0.01)
    # 32 cores of 61.5 TFLOP/s at 45 %.
    minutes = plan.figure("the index", "a refresh takes") / 60
    assert minutes == pytest.approx(6.456e17 / (32 * 61.5e12 * 0.45) / 60, rel=0.01)
    assert 10.5 < minutes < 13.5


@pytest.mark.parametrize(
    ("trainer", "chosen"),
    [
        ("v5p-128", "none"),
        pytest.param("v4-128", "attention", marks=pytest.mark.full),
        pytest.param("v3-64", "full", marks=pytest.mark.full),
    ],
)
def test_auto_takes_the_cheapest_that_fits(trainer, chosen):
    setting = on(trainer)
    plan = commands.training(
        *("pretrain", pretraining(device=BFLOAT16)),
        dataclasses.replace(setting, chooses_remat=True),
    )
    assert plan.bindings == {"bert.BertConfig.remat": f'"{chosen}"'}
    assert not plan.problems
    for cheaper in REMAT[: REMAT.index(chosen)]:
        alone = pretraining(bert={"remat": cheaper}, device=BFLOAT16)
        assert not devices.of_training(alone, setting).fits


@pytest.mark.full
def test_advice_helps_as_much_as_it_says():
    config = pretraining(bert={"remat": "none"})
    setting = on("v3-8")
    [advice] = commands.training("pretrain", config, setting).problems
    knobs = dict(knob.split("=") for knob in advice.split(" would")[0].split(" and "))
    assert knobs.keys() <= {
        "MICROBATCHES",
        "partitioning.MeshConfig.fsdp",
        "bert.BertConfig.remat",
        "searchers.DeviceConfig.precision",
    }
    changed = pretraining(
        bert={"remat": "full"},
        microbatches=int(knobs["MICROBATCHES"]),
        mesh=MeshConfig(fsdp=int(knobs.get("partitioning.MeshConfig.fsdp", 1))),
        device=DeviceConfig("bfloat16"),
    )
    fits = devices.of_training(changed, setting)
    assert fits.fits
    assert f"{fits.total / GIB:.1f} GiB" in advice
    fewer = dataclasses.replace(changed, microbatches=changed.microbatches // 2)
    assert not devices.of_training(fewer, setting).fits


@pytest.mark.full
def test_what_nothing_helps_says_so():
    config = pretraining(bert={"num_layers": 400}, batch_size=8)
    [problem] = commands.training("pretrain", config, on("v2-8")).problems
    assert "no setting makes it fit on v2-8" in problem


def test_parameters_and_optimizer_are_split_by_fsdp_alone():
    for fsdp in (1, 8):
        config = pretraining(mesh=MeshConfig(fsdp=fsdp))
        setting = on("v3-64")
        mesh = devices.mesh_of(setting, config.mesh)
        stage = programs.training(config, PAPER, mesh)
        held = devices.held(config, stage, setting)
        # Two towers and a reader of 110 M parameters.
        assert held["parameters"] == pytest.approx(3 * 110e6 * 4 / fsdp, rel=0.03)
        assert held["optimizer state"] == pytest.approx(
            2 * held["parameters"], rel=0.01
        )
        # 13.35 M rows of 128, over all devices whatever the mesh, in whole chunks.
        assert held["embeddings"] == pytest.approx(13.35e6 * 128 * 4 / 64, rel=0.03)
        assert held["embeddings, the next"] == held["embeddings"]


@pytest.mark.full
def test_age_of_an_index_and_what_to_do_about_it():
    config = pretraining(max_staleness_steps=600)
    plan = commands.training("pretrain", config, on("v4-64", "v4-16"))
    index = "the index"
    takes = plan.figure(index, "a refresh takes") / plan.figure("an update", "takes")
    assert plan.figure(index, "youngest") == pytest.approx(takes)
    assert plan.figure(index, "a new index") == 500 * -(-takes // 500)
    assert plan.figure(index, "oldest") == pytest.approx(500 * -(-takes // 500) + takes)
    skips, waits = plan.hints
    assert "the builder skips" in skips
    assert "the trainer will wait" in waits


@pytest.mark.full  # It traces several updates of the paper's.
def test_a_run_costs_what_its_chips_cost_while_it_lasts():
    prices = {"v4": 3.0}
    setting = on("v4-64", "v4-16", chip_hour_prices=prices)
    plan = commands.training("pretrain", pretraining(), setting)
    hours = plan.figure("the run", "takes") / 3600
    assert plan.figure("the run", "costs") == pytest.approx(hours * 3.0 * (32 + 8))
    update = plan.figure("an update", "takes")
    assert hours == pytest.approx(200_000 * update / 3600)
    assert plan.figure("an update", "a stall ends the run after") == 600


@pytest.mark.parametrize(
    ("latency_ms", "bound"), [(10.0, "latency"), (0.0, "memory, 1,200 GB/s")]
)
def test_a_tiny_update_takes_as_long_as_its_latency_or_its_bytes(latency_ms, bound):
    sizes = {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "mlp_size": 512}
    config = pretraining(bert={"remat": "none", **sizes}, batch_size=32)
    setting = on("v4-64", step_latency_ms=latency_ms)
    plan = commands.training("pretrain", config, setting)
    [takes] = [line for line in plan.sections["an update"] if line.name == "takes"]
    assert takes.note.startswith(f"bound by {bound}")
    if latency_ms:
        assert takes.value == 0.01
        return
    # Each of them: read; its gradient written and read; written, as are two moments,
    # which are read too. And the index, in float32, each chip's share of it.
    parameters = plan.figure("memory of a device", "parameters") / 4
    index = plan.figure("memory of a device", "embeddings")
    assert 3 * 4e6 < parameters < 3 * 5e6  # BERT-tiny has 4.4 million.
    assert takes.value == pytest.approx((parameters * 4 * 8 + index) / 1200e9, rel=0.01)


@pytest.mark.full
def test_blocking_refreshes_are_part_of_the_run():
    settings = [on("v4-64", "v4-16") for _ in range(2)]
    config = pretraining(refresh_mode="blocking")
    beside, alone = (
        commands.training("pretrain", c, s)
        for c, s in zip((pretraining(), config), settings, strict=True)
    )
    stands = alone.figure("the run", "takes") - beside.figure("the run", "takes")
    # The trainer's 32 chips embed 400 times.
    refresh = alone.figure("the index", "a refresh takes")
    assert refresh == pytest.approx(beside.figure("the index", "a refresh takes") / 4)
    assert stands == pytest.approx(400 * refresh)


@pytest.mark.full
def test_slices_share_the_batch_and_cost_by_number():
    one, two = (
        commands.training(
            "pretrain",
            pretraining(),
            on("v4-64", trainer_slices=number, chip_hour_prices={"v4": 3.0}),
        )
        for number in (1, 2)
    )
    assert "data x fsdp x model: 64 x 1 x 1" in two.title
    shares = [plan.figure("memory of a device", "temporaries") for plan in (one, two)]
    gradient = 3 * 110e6 * 4
    assert shares[0] - gradient == pytest.approx(2 * (shares[1] - gradient), rel=0.03)
    takes = [plan.figure("an update", "takes") for plan in (one, two)]
    assert takes[0] == pytest.approx(2 * takes[1], rel=0.001)


@pytest.mark.full
@pytest.mark.usefixtures("planner_cache")
@pytest.mark.parametrize("searcher", ["device", "scann"])
def test_counted_bytes_follow_the_compiler_of_this_machine(searcher):
    """A small update on a CPU, for which XLA is here."""
    small = {"num_layers": 6, "hidden_size": 64, "num_heads": 2, "mlp_size": 256}
    corpus = CorpusSize(1000, 500)
    found = {}
    for remat in ("none", "full"):
        config = pretraining(
            bert={**small, "dtype": "float32", "remat": remat},
            batch_size=16,
            num_candidates=4,
            searcher=searcher,
            models=ModelFactory(
                functools.partial(base, **small, dtype="float32", remat=remat),
                TOWERS,
                Lengths(16, 48, 64),
            ),
        )
        setting = dataclasses.replace(on("cpu", corpus=corpus), compiles=True)
        compiled = devices.of_training(config, setting).temporaries
        assert compiled.source is memory.Source.COMPILED
        mesh = devices.mesh_of(setting, config.mesh)
        counted = memory.counted(config, corpus, mesh)
        found[remat] = (compiled.num_bytes, counted.num_bytes)
        assert 0.5 < counted.num_bytes / compiled.num_bytes < 2
    # Both see that recomputation saves memory, and about how much.
    assert found["full"][0] < found["none"][0]
    assert found["full"][1] < found["none"][1]


def test_a_program_is_compiled_once_for_a_compiler(planner_cache, monkeypatch):
    mesh = memory.compiler_mesh(parse("cpu"), MeshConfig())
    found, measure = [], memory._measured

    def measured(lowered):
        found.append(measure(lowered))
        return found[-1]

    def compiled(size):
        shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
        program = jax.jit(lambda x: jnp.sort(x @ x) @ x)
        return memory.compiled(program, [shape], mesh)

    monkeypatch.setattr(memory, "_measured", measured)
    first = compiled(64)
    assert first.num_bytes >= 64 * 64 * 4
    assert compiled(64) == first
    assert len(found) == 1
    [file] = planner_cache.iterdir()
    file.write_text("[")
    assert compiled(64) == first
    assert compiled(65) != first
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    assert compiled(64) == first
    assert len(found) == 4


def plan_line(*files, fast=True):
    arguments = [f"--gin_file={tiny_run.GIN / file}.gin" for file in files]
    return ["plan", *(["--fast"] if fast else []), *arguments]


def run(arguments, capsys):
    code = tpu_launch.main(arguments)
    return code, capsys.readouterr()


HARDWARE = sorted(path.stem for path in (tiny_run.GIN / "hardware").glob("*.gin"))
RUNS = [*tiny_run.CHAIN, "ask", "build-index", "update-corpus"]


def pair(number, command, hardware):
    """Every file is planned every day, all pairs by `make test-full`."""
    is_everyday = number % len(HARDWARE) == RUNS.index(command) % len(HARDWARE)
    return pytest.param(
        command, hardware, marks=() if is_everyday else (pytest.mark.full,)
    )


@pytest.mark.parametrize(
    ("command", "hardware"),
    [pair(i, *p) for i, p in enumerate(itertools.product(RUNS, HARDWARE))],
)
def test_every_run_file_plans_for_every_hardware_file(
    command, hardware, tmp_path, capsys
):
    file = f"runs/{command.replace('-', '_')}"
    bindings = [f"--gin.{b}" for b in tiny_run.bindings(command, tmp_path)]
    batch = ["--gin.BATCH_SIZE=64"] if command == "finetune" else []
    models = [] if command in ("prepare", "update-corpus") else ["models/tiny"]
    hardware_files = [] if not models else [f"hardware/{hardware}"]
    arguments = [*plan_line(*models, *hardware_files, file), "--json", *bindings]
    code, said = run([*arguments, *batch], capsys)
    [plan] = json.loads(said.out)["plans"]
    assert plan["title"].startswith(command)
    assert code == (2 if plan["problems"] else 0)
    if command in ("pretrain", "warm-start", "finetune"):
        assert plan["sections"]["an update"]["takes"]["value"] > 0
        assert parse(_trainer(hardware)).accelerator_type in plan["title"]


def _trainer(hardware):
    file = tiny_run.GIN / "hardware" / f"{hardware}.gin"
    parser = configuration.make_parser("", "")
    configuration.parse(parser, [f"--gin_file={file}"])
    return configuration.configured(HardwareConfig).trainer


@pytest.mark.full
@pytest.mark.parametrize("chain", ["quickstart", "from_nothing"])
def test_a_chain_is_planned_stage_by_stage(chain, capsys):
    code, said = run(plan_line(f"runs/{chain}"), capsys)
    assert code == 0, said
    for stage in tiny_run.CHAIN:
        assert f"{stage} on " in said.out


PAPERS = ["runs/pretrain_paper", "hardware/v4_64"]
REQUIRED = [
    f"--gin.{name}={value}"
    for name, value in {
        "MODEL_DIR": '"m"',
        "CORPUS": '"none"',
        "TASK": '"t"',
        "WARM_START": '""',
    }.items()
]


@pytest.mark.full
def test_the_papers_run_in_one_table(capsys):
    code, said = run([*plan_line(*PAPERS), *REQUIRED], capsys)
    assert code == 0, said
    for words in (
        "pretrain on v4-64 (data x fsdp x model: 32 x 1 x 1), index builder on v4-16",
        "13,353,718",
        "645.6 PFLOP",
        "1,291.8 TFLOP",
        "32 x 1 x 1",
        # docs/pods.md says these two.
        "25.1 GiB",
        "2.1 GiB",
        "there is on its disk",
    ):
        assert words in said.out.replace("\n", " "), said.out


@pytest.mark.full
@pytest.mark.parametrize(
    ("hardware", "mode", "apart", "oldest"),
    [
        ("v4_64", "async", 2000, 3510),
        ("v4_64_v4_64", "async", 500, 877),
        ("v4_64_v4_64", "rolling", None, 500),
    ],
)
def test_the_papers_index_is_as_old_as_the_pages_say(
    hardware, mode, apart, oldest, capsys
):
    files = plan_line("runs/pretrain_paper", f"hardware/{hardware}")
    arguments = [*files, *REQUIRED, "--json", f"--gin.REFRESH_MODE={mode}"]
    code, said = run(arguments, capsys)
    assert code == 0, said
    index = json.loads(said.out)["plans"][0]["sections"]["the index"]
    assert index["oldest"]["value"] == pytest.approx(oldest, abs=1)
    if apart:
        assert index["a new index"]["value"] == apart
    page = (tiny_run.ROOT / "docs" / "pods.md").read_text()
    assert f" {oldest:,} |" in page


@pytest.mark.full  # It traces several updates of the paper's.
def test_what_does_not_fit_is_said_and_has_code_2(capsys):
    small = ['--gin.hardware.HardwareConfig.trainer="v2-8"', "--gin.BATCH_SIZE=64"]
    code, said = run([*plan_line(*PAPERS), *REQUIRED, *small], capsys)
    assert code == 2
    assert "does not fit: MICROBATCHES=" in said.out


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("partitioning.MeshConfig.model=0", "MeshConfig.model to be a whole number"),
        ("partitioning.MeshConfig.model=32", "MeshConfig.model to divide num_heads"),
        ("partitioning.MeshConfig.fsdp=5", "multiply to the 32 devices"),
        ("hardware.HardwareConfig.trainer_slices=0", "of at least 1, got 0"),
        ("hardware.HardwareConfig.trainer_slices=-1", "of at least 1, got -1"),
        ("hardware.HardwareConfig.utilization=0", "HardwareConfig.utilization"),
        ("hardware.HardwareConfig.utilization=5.0", "a share above 0"),
    ],
)
def test_machines_that_cannot_be_are_one_line(binding, said, capsys):
    arguments = [*plan_line(*PAPERS), *REQUIRED, f"--gin.{binding}"]
    code, printed = run(arguments, capsys)
    assert code == 2
    [line] = printed.err.splitlines()
    assert said in line


def test_advice_never_asks_for_a_mesh_that_does_not_split_the_model():
    """The 768 features of BERT-base are 256 x 3: no 512 devices share them evenly."""
    config = pretraining(bert={"remat": "full"}, batch_size=512)
    knobs = [name for name, _ in devices._knobs(config, on("v4-1024"))]
    assert knobs[-1] == "partitioning.MeshConfig.fsdp=256"


@pytest.mark.full
def test_what_was_chosen_is_a_gin_file_of_its_own(tmp_path, capsys):
    file = tmp_path / "plan.gin"
    auto = '--gin.bert.BertConfig.remat="auto"'
    arguments = [*plan_line(*PAPERS), *REQUIRED, auto]
    code, said = run([*arguments, f"--write={file}"], capsys)
    assert code == 0, said
    parser = configuration.make_parser("", "")
    files = [f"--gin_file={tiny_run.GIN / name}.gin" for name in PAPERS]
    configuration.parse(parser, [*files, *REQUIRED, f"--gin_file={file}"])
    config = configuration.configured(PretrainConfig)
    assert config.models.bert(vocab_size=9).remat == "dots"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (plan_line("hardware/v4_64"), "expected the run file of a command"),
        (plan_line("runs/pretrain", "models/tiny"), "MODEL_DIR/macro.value"),
        (["plan"], "at least one --gin_file"),
        (["plans"], "unknown command 'plans'"),
        (
            [
                *plan_line(*PAPERS),
                *REQUIRED,
                '--gin.hardware.HardwareConfig.trainer="v4-63"',
            ],
            "got 'v4-63'",
        ),
        (
            [*plan_line(*PAPERS), *REQUIRED, "--gin.BATCH_SIZE=100"],
            "expected a batch size that 32",
        ),
        (
            [*plan_line("hardware/cpu", "runs/build_index"), *REQUIRED[:2]],
            "expected a model file",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    code, printed = run(arguments, capsys)
    assert code == 2
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert len(printed.err.strip().splitlines()) == 1


@pytest.mark.parametrize("file", ["nowhere/plan.gin", "file/plan.gin", ""])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_planned(
    file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "tpu_launch.plan.plan_command", lambda *_: pytest.fail("it was planned")
    )
    (tmp_path / "file").touch()
    write = f"--write={tmp_path / file}"
    code, printed = run([*plan_line(*PAPERS), *REQUIRED, write], capsys)
    assert code == 2
    [line] = printed.err.splitlines()
    assert f"expected a file that can be written, got {tmp_path}" in line


@pytest.mark.full
def test_warm_start_counts_both_losses():
    config = pretraining(
        WarmStartConfig,
        bert={"remat": "none"},
        batch_size=4096,
        task="my_salient",
        pairs_task="my_ict",
    )
    plan = commands.training("warm-start", config, on("v3-64"))
    # 4,096 pairs of 96 and 288 wordpieces, and 512 sentences joined in 384: by the
    # parameters of BERT-base's layers, attention, and thrice for the gradient. Of the
    # last layer keys and values everywhere, all else at [CLS] and at 10 masks.
    width = 768

    def layer(length, read):
        weights = 2 * length * width**2 + 10 * read * width**2
        return weights + 2 * read * length * width

    def forward(count, length, read):
        return 2 * count * (11 * layer(length, length) + layer(length, read))

    expected = 3 * (
        forward(4096, 96, 1) + forward(4096, 288, 1) + forward(512, 384, 10)
    )
    needs = plan.figure("an update", "the model needs")
    # The products of a query with all documents, and the masked-LM head.
    assert needs == pytest.approx(expected, rel=0.01)


@pytest.mark.full
def test_a_warm_start_that_reads_retrieved_documents_holds_their_index():
    tasks = {"task": "my_salient", "pairs_task": "my_ict"}
    without, retrieving, untrained = (
        commands.training(
            "warm-start",
            pretraining(WarmStartConfig, bert={"remat": "none"}, **(tasks | changes)),
            on("v3-64"),
        )
        for changes in (
            {},
            {"mixture": ReaderMixture(0.5, 0.0, 0.5)},
            {"mixture": ReaderMixture(0.5, 0.0, 0.5), "task": ""},
        )
    )
    # float32 of 128, split over 64 cores; each fills up its last chunk of rows.
    exactly = PAPER.num_blocks * 128 * 4 / 64
    found = retrieving.figure("memory of a device", "embeddings")
    assert exactly <= found <= 1.03 * exactly
    stands = retrieving.figure("the index", "a refresh takes")
    assert retrieving.figure("the run", "takes") == pytest.approx(
        without.figure("the run", "takes") + stands
    )
    for plan in (without, untrained):
        assert "the index" not in plan.sections


def test_stopping_does_not_wait_for_the_compiler():
    stop, forever = threading.Event(), threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        unless_stopped(lambda: [forever.wait()], stop, "stopped")


@pytest.mark.full
def test_what_a_host_cannot_hold_is_said(capsys):
    files = plan_line("runs/pretrain_paper", "models/tiny", "hardware/v4_64")
    setting = "--gin.hardware.HardwareConfig.host_disk_gib=3"
    code, said = run([*files, *REQUIRED, "--json", setting], capsys)
    assert code == 2
    [plan] = json.loads(said.out)["plans"]
    host = {name: line["value"] for name, line in plan["sections"]["a host"].items()}
    corpus, examples = (
        host[f"the {what} on its disk"] for what in ("corpus", "examples")
    )
    # Of each of 82 million sentences: block (4 bytes), begin and end (2 each) and two
    # bytes for each of two spans, and where its rows begin (8).
    assert examples == 82_000_000 * (2 * (4 + 2 * 2 + 2) + 8)
    assert host["on its disk, in all"] == corpus + examples
    assert host["there is on its disk"] == 3 * GIB
    [problem] = plan["problems"]
    size = f"{(corpus + examples) / GIB:,.1f} GiB and has 3.0"
    assert problem.startswith(f"the disk of a host would hold {size} (hardware.Hardw")


@pytest.mark.full
def test_examples_that_are_there_are_counted_as_they_are(tmp_path, capsys):
    world = tiny_world.make(tmp_path)
    folder = tmp_path / "corpus/examples"
    found = sum(path.stat().st_size for path in (folder / "asked").rglob("*.*"))
    assert 0 < found < sum(path.stat().st_size for path in folder.rglob("*.*"))
    corpus = [f"--gin.CORPUS={world.corpus}", f"--gin.MODEL_DIR={tmp_path / 'model'}"]
    models = plan_line("models/tiny", "hardware/cpu", "runs/pretrain")
    rest = ['--gin.TASK="asked"', REQUIRED[3], *corpus, "--gin.BATCH_SIZE=64", "--json"]
    code, said = run([*models, *rest], capsys)
    assert code == 0, said
    sections = json.loads(said.out)["plans"][0]["sections"]
    host = {name: line["value"] for name, line in sections["a host"].items()}
    assert host["the examples on its disk"] == found
    # One host, and a folder: its checkpoints are there, too.
    kept = sections["the model directory"]["in all"]["value"]
    assert host["MODEL_DIR on its disk"] == kept
    parts = ("the corpus on its disk", "the examples on its disk")
    assert host["on its disk, in all"] == kept + sum(host[name] for name in parts)
