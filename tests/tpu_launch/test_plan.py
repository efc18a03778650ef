"""What the planner says, against figures that were known without it."""

import dataclasses
import functools
import json
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from realm_jax.cli import configuration
from realm_jax.data.wordpiece import SPECIAL_PIECES
from realm_jax.errors import StoppedError
from realm_jax.hardware import HardwareConfig
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import DeviceConfig
from realm_jax.models.bert import REMAT
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.warm_start import ReaderMixture, WarmStartConfig
from realm_jax.types import Lengths
from tests import tiny_run, tiny_world
from tests.tiny_encoder import write_bert
from tests.tpu_launch.planning import BFLOAT16, PAPER, TINY, on, stage
from tpu_launch import __main__ as tpu_launch
from tpu_launch.planner import commands, costs, devices, memory, programs
from tpu_launch.planner.devices import DeviceMemory
from tpu_launch.planner.figures import Plan
from tpu_launch.slices import parse
from tpu_launch.status import unless_stopped

GIB = 1 << 30


def plan(config, setting, command="pretrain"):
    return commands.training(command, config, setting)


@pytest.fixture(scope="module")
def paper():
    """The paper's run, without what is computed again."""
    config = stage(
        bert={"remat": "none"}, lengths=Lengths(64, 288, 352), max_staleness_steps=600
    )
    return plan(config, on("v3-64", "v3-32", chip_hour_prices={"v3": 2.0}))


def encoding(sequences, length, read):
    """BERT-base forwards and backwards: 6 operations a weight, 12 a pair of heads.

    The last layer needs keys and values everywhere, all else where it is read.
    """
    keys_and_values, others = 2 * 768**2, 2 * 768**2 + 2 * 768 * 3072

    def layer(positions):
        weights = length * keys_and_values + positions * others
        return 6 * weights + 12 * positions * length * 768

    return sequences * (11 * layer(length) + layer(read))


def test_the_papers_update_and_refresh_are_as_large_as_they_are_known_to_be(paper):
    """1,203 TFLOP at 64, 288 and 352 wordpieces, 646 PFLOP to embed Wikipedia.

    It would be 1,453 with all of every last layer and a null document that is as long
    as the others: reader 791, documents 639, queries 17 and head 6. The null document
    saves 161 of that, the last layers 89.
    """
    needs = paper.figure("an update", "the model needs")
    expected = (
        encoding(512, 64, 1)
        + encoding(512 * 7, 288, 1)
        + encoding(512, 3, 1)
        + encoding(512 * 7, 352, 10)
        + encoding(512, 65, 10)
        + 6 * 512 * 8 * 10 * 30522 * 768  # The head.
    )
    assert needs == pytest.approx(expected, rel=0.01)
    assert needs == pytest.approx(1.203e15, rel=0.01)
    embedding = paper.figure("the index", "to embed them")
    assert embedding == pytest.approx(6.456e17, rel=0.01)
    # 32 cores of 61.5 TFLOP/s at 45 %.
    minutes = paper.figure("the index", "a refresh takes") / 60
    assert minutes == pytest.approx(6.456e17 / (32 * 61.5e12 * 0.45) / 60, rel=0.01)
    assert 10.5 < minutes < 13.5


@pytest.mark.full
def test_the_wordpieces_of_prompts_are_computed_too():
    """Twelve before a query and forty before a document, null documents included."""
    prefixes = {"query_prefix": (1,) * 12, "document_prefix": (2,) * 40}
    towers = functools.partial(RetrieverConfig, shared=False, **prefixes)
    config = stage(bert={"remat": "none"}, lengths=Lengths(64, 288, 352))
    models = dataclasses.replace(config.models, retriever=towers)
    setting = on("v3-64", corpus=dataclasses.replace(PAPER, mean_length=87))
    planned = plan(dataclasses.replace(config, models=models), setting)
    plain = plan(config, setting)
    more = (
        # The search embeds the queries once more, forwards.
        4 / 3 * (encoding(512, 76, 1) - encoding(512, 64, 1))
        + encoding(512 * 7, 328, 1)
        - encoding(512 * 7, 288, 1)
        + encoding(512, 43, 1)
        - encoding(512, 3, 1)
    )
    needs = [one.figure("an update", "the model needs") for one in (planned, plain)]
    assert needs[0] - needs[1] == pytest.approx(more, rel=0.01)
    # A batch of blocks of 87 wordpieces is 100 long, of which 13 are padding.
    embeds = [one.figure("the index", "to embed them") for one in (planned, plain)]
    whole = PAPER.num_blocks * encoding(1, 328, 1) / 3
    assert embeds[0] == pytest.approx(whole * 140 / 328, rel=0.01)
    whole = PAPER.num_blocks * encoding(1, 288, 1) / 3
    assert embeds[1] == pytest.approx(whole * 100 / 288, rel=0.01)


def test_what_a_device_holds_and_a_run_costs_of_the_paper(paper):
    held = {line.name: line.value for line in paper.sections["memory of a device"]}
    # Two towers and a reader of 110 M parameters.
    assert held["parameters"] == pytest.approx(3 * 110e6 * 4, rel=0.03)
    assert held["optimizer state"] == pytest.approx(2 * held["parameters"], rel=0.01)
    # 13.35 M rows of 128, over all devices whatever the mesh, in whole chunks.
    assert held["embeddings"] == pytest.approx(13.35e6 * 128 * 4 / 64, rel=0.03)
    assert held["embeddings, the next"] == held["embeddings"]
    hours = paper.figure("the run", "takes") / 3600
    assert hours == pytest.approx(200_000 * paper.figure("an update", "takes") / 3600)
    # 32 chips and 16.
    assert paper.figure("the run", "costs") == pytest.approx(hours * 2.0 * (32 + 16))
    assert paper.figure("an update", "a stall ends the run after") == 600


def test_age_of_an_index_and_what_to_do_about_it(paper):
    index = functools.partial(paper.figure, "the index")
    takes = index("a refresh takes") / paper.figure("an update", "takes")
    assert index("youngest") == pytest.approx(takes)
    assert index("a new index") == 500 * -(-takes // 500)
    assert index("oldest") == pytest.approx(500 * -(-takes // 500) + takes)
    skips, waits = paper.hints
    assert "the builder skips" in skips
    assert "the trainer will wait" in waits


@pytest.mark.parametrize(
    ("remat", "gib"),
    [
        pytest.param("none", 45.8, marks=pytest.mark.full),
        ("attention", 18.9),
        pytest.param("dots", 13.8, marks=pytest.mark.full),
    ],
)
def test_what_is_counted_is_what_the_compiler_found(remat, gib):
    """Of the paper's update on 64 cores of v3, compiled once and for all."""
    config = stage(bert={"remat": remat}, device=BFLOAT16)
    mesh = memory.shape_mesh(on("v3-64").mesh_shape(config.mesh))
    counted = memory.counted(config, PAPER, mesh)
    assert counted.num_bytes / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(
    ("trainer", "bert", "chosen"),
    [
        ("v4-8", TINY, "none"),
        pytest.param("v4-128", {}, "attention", marks=pytest.mark.full),
        pytest.param("v3-64", {}, "full", marks=pytest.mark.full),
    ],
)
def test_auto_takes_the_cheapest_that_fits(trainer, bert, chosen):
    setting = dataclasses.replace(on(trainer), chooses_remat=True)
    found = devices.of_training(stage(bert=bert, device=BFLOAT16), setting)
    assert found.fits
    assert memory.encoder_of(found.config).remat == chosen
    for cheaper in REMAT[: REMAT.index(chosen)]:
        alone = stage(bert={"remat": cheaper}, device=BFLOAT16)
        assert not devices.counted(alone, on(trainer)).fits


@pytest.mark.full
def test_advice_helps_as_much_as_it_says():
    setting = on("v3-8")
    [advice] = plan(stage(bert={"remat": "none"}), setting).problems
    knobs = dict(knob.split("=") for knob in advice.split(" would")[0].split(" and "))
    changed = stage(
        bert={"remat": "full"},
        microbatches=int(knobs["MICROBATCHES"]),
        mesh=MeshConfig(fsdp=int(knobs.get("partitioning.MeshConfig.fsdp", 1))),
        device=DeviceConfig("bfloat16"),
    )
    fits = devices.counted(changed, setting)
    assert fits.fits
    assert f"{fits.total / GIB:.1f} GiB" in advice
    fewer = dataclasses.replace(changed, microbatches=changed.microbatches // 2)
    assert not devices.counted(fewer, setting).fits
    [problem] = plan(stage(bert={"num_layers": 400}, batch_size=8), on("v2-8")).problems
    assert "no setting makes it fit on v2-8" in problem


def traced(config, setting):
    """What a device holds, without its temporaries."""
    mesh = memory.shape_mesh(setting.mesh_shape(config.mesh))
    made = programs.training(config, setting.corpus, mesh)
    held = devices.held(config, made, setting)
    return DeviceMemory(config, made, held, memory.Temporaries(0, False), 0)


def test_parameters_and_optimizer_are_split_by_fsdp_alone():
    whole, split = (
        traced(stage(bert=TINY, mesh=MeshConfig(fsdp=n)), on("v3-64")).held
        for n in (1, 8)
    )
    for name, share in (("parameters", 8), ("optimizer state", 8), ("embeddings", 1)):
        assert whole[name] == pytest.approx(share * split[name], rel=0.03)


def test_advice_never_asks_for_a_mesh_that_does_not_split_the_model():
    """The 768 features of BERT-base are 256 x 3: no 512 devices share them evenly."""
    *_, (name, value, _) = devices.knobs(stage(bert={"remat": "full"}), on("v4-1024"))
    assert f"{name}={value}" == "partitioning.MeshConfig.fsdp=256"


def test_a_tiny_update_takes_as_long_as_its_latency_or_its_bytes(monkeypatch):
    monkeypatch.setattr("realm_jax.training.flops.count", lambda *_: 1)
    found = traced(stage(bert={**TINY, "remat": "none"}, batch_size=32), on("v4-64"))
    lines, seconds = costs.update_lines(found, on("v4-64", step_latency_ms=10.0))
    assert seconds == 0.01
    assert "bound by latency, as stated" in [line.note for line in lines]
    lines, seconds = costs.update_lines(found, on("v4-64", step_latency_ms=0.0))
    assert "bound by memory, 1,200 GB/s" in [line.note for line in lines]
    # Each of them: read; its gradient written and read; written, as are two moments,
    # which are read too. And the index, in float32, each chip's share of it.
    parameters = found.held["parameters"] / 4
    assert 3 * 4e6 < parameters < 3 * 5e6  # BERT-tiny has 4.4 million.
    moved = parameters * 4 * 8 + found.held["embeddings"]
    assert seconds == pytest.approx(moved / 1200e9, rel=0.01)


@pytest.mark.full
def test_float32_on_a_tpu_is_pointed_out():
    """A model file after the hardware file brings its own DTYPE back, unnoticed."""
    for dtype, machines, is_said in (
        ("float32", "v4-8", True),
        ("bfloat16", "v4-8", False),
        ("float32", "cpu", False),
    ):
        bert = {**TINY, "remat": "none", "dtype": dtype}
        planned = plan(
            stage(bert=bert, batch_size=8, refresh_mode="off"),
            on(machines, peak_tflops=0.1),
        )
        assert ("float32" in " ".join(planned.hints)) == is_said


@pytest.mark.full
def test_blocking_refreshes_are_part_of_the_run():
    beside, alone = (
        plan(stage(bert=TINY, refresh_mode=mode), on("v4-64", "v4-16"))
        for mode in ("async", "blocking")
    )
    stands = alone.figure("the run", "takes") - beside.figure("the run", "takes")
    # The trainer's 32 chips embed 400 times.
    refresh = alone.figure("the index", "a refresh takes")
    assert refresh == pytest.approx(beside.figure("the index", "a refresh takes") / 4)
    assert stands == pytest.approx(400 * refresh)


@pytest.mark.full
def test_slices_share_the_batch_and_cost_by_number():
    one, two = (plan(stage(), on("v4-64", trainer_slices=n)) for n in (1, 2))
    assert "data x fsdp x model: 64 x 1 x 1" in two.title
    shares = [found.figure("memory of a device", "temporaries") for found in (one, two)]
    gradient = 3 * 110e6 * 4
    assert shares[0] - gradient == pytest.approx(2 * (shares[1] - gradient), rel=0.03)
    takes = [found.figure("an update", "takes") for found in (one, two)]
    assert takes[0] == pytest.approx(2 * takes[1], rel=0.001)


def test_a_program_is_compiled_once_for_a_compiler(planner_cache, monkeypatch):
    mesh = memory.compiler_mesh(parse("cpu"), MeshConfig())
    measured = mock.Mock(wraps=memory._measured)

    def compiled(size):
        shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
        program = jax.jit(lambda x: jnp.sort(x @ x) @ x)
        return memory.compiled(program, [shape], mesh)

    monkeypatch.setattr(memory, "_measured", measured)
    first = compiled(64)
    assert first.num_bytes >= 64 * 64 * 4
    assert compiled(64) == first
    assert measured.call_count == 1
    [file] = planner_cache.iterdir()
    file.write_text("[")
    assert compiled(64) == first
    assert compiled(65) != first
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    assert compiled(64) == first
    assert measured.call_count == 4


def test_a_host_has_the_examples_of_its_tasks():
    """28 bytes of a masked sentence, and 9 of a pair.

    Of each of two spans: block (4), begin and end (2 each) and two more; and where the
    rows of the sentence begin (8).
    """
    sentences = 13_353_718 * 288 / 28  # Of 28 wordpieces.
    for task, pairs_task, size in (("t", "", 28), ("", "p", 9), ("t", "p", 37)):
        config = stage(WarmStartConfig, task=task, pairs_task=pairs_task)
        examples = commands._examples(on("v4-64"), 288, config)
        assert examples.value / size == pytest.approx(sentences)
    models = stage(bert=TINY).models
    builder = commands.build_index(models, EmbedConfig(), on("v4-64", "v4-16"))
    names = [line.name for line in builder.sections["a host"]]
    assert names[:2] == ["the corpus on its disk", "on its disk, in all"]
    # What a host cannot hold is said.
    setting = on("v4-64", host_disk_gib=3.0)
    examples = commands._examples(setting, 288, stage())
    lines, [problem] = commands._disk(setting, 288, examples)
    corpus, its_examples, total, there_is = (line.value for line in lines)
    assert (total, there_is) == (corpus + its_examples, 3 * GIB)
    size = f"{total / GIB:,.1f} GiB and has 3.0"
    assert problem.startswith(f"the disk of a host would hold {size} (hardware.Hardw")
    assert commands._disk(on("v4-64", host_disk_gib=80.0), 288, examples)[1] == []


@pytest.mark.full
def test_warm_start_counts_both_losses():
    tasks = {"task": "my_salient", "pairs_task": "my_ict"}
    config = stage(WarmStartConfig, bert={"remat": "none"}, batch_size=4096, **tasks)
    # 4,096 pairs of 96 and 288 wordpieces, and 512 sentences joined in 384.
    expected = encoding(4096, 96, 1) + encoding(4096, 288, 1) + encoding(512, 384, 10)
    needs = plan(config, on("v3-64"), "warm-start").figure(
        "an update", "the model needs"
    )
    # The products of a query with all documents, and the masked-LM head.
    assert needs == pytest.approx(expected, rel=0.01)


@pytest.mark.full
def test_a_warm_start_that_reads_retrieved_documents_holds_their_index():
    tasks = {"task": "my_salient", "pairs_task": "my_ict"}
    retrieves = {"mixture": ReaderMixture(0.5, 0.0, 0.5)}
    without, retrieving, untrained = (
        plan(
            stage(WarmStartConfig, bert=TINY, **(tasks | changes)),
            on("v3-64"),
            "warm-start",
        )
        for changes in ({}, retrieves, {**retrieves, "task": ""})
    )
    # float32 of 128, split over 64 cores; each fills up its last chunk of rows.
    exactly = PAPER.num_blocks * 128 * 4 / 64
    found = retrieving.figure("memory of a device", "embeddings")
    assert exactly <= found <= 1.03 * exactly
    stands = retrieving.figure("the index", "a refresh takes")
    assert retrieving.figure("the run", "takes") == pytest.approx(
        without.figure("the run", "takes") + stands
    )
    for one in (without, untrained):
        assert "the index" not in one.sections


def test_stopping_does_not_wait_for_the_compiler():
    stop, forever = threading.Event(), threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        unless_stopped(forever.wait, stop, "stopped")
    forever.set()


# What follows is the command.


def plan_line(*files):
    return ["plan", "--fast", *(f"--gin_file={tiny_run.GIN / f}.gin" for f in files)]


MACROS = {"MODEL_DIR": "m", "CORPUS": "none", "TASK": "t", "WARM_START": ""}
REQUIRED = [f'--gin.{name}="{value}"' for name, value in MACROS.items()]
PAPERS = [*plan_line("runs/pretrain_paper", "hardware/v4_64"), *REQUIRED]


@pytest.fixture
def planned(capsys):
    """Runs a plan, which may not fit; returns the only plan of its JSON."""

    def planned(*arguments):
        code = tpu_launch.main([*arguments, "--json"])
        out, err = capsys.readouterr()
        assert out, err
        [found] = json.loads(out)["plans"]
        assert code == (2 if found["problems"] else 0)
        return found

    return planned


HARDWARE = sorted(path.stem for path in (tiny_run.GIN / "hardware").glob("*.gin"))
RUNS = [*tiny_run.CHAIN, "ask", "build-index", "update-corpus"]


def pairs():
    """Every file is planned every day, and fine-tuning on all by `make test-full`."""
    for i, command in enumerate(RUNS):
        yield command, HARDWARE[i % len(HARDWARE)]
    for hardware in HARDWARE:
        yield pytest.param("finetune", hardware, marks=pytest.mark.full)


@pytest.mark.parametrize(("command", "hardware"), pairs())
def test_every_run_file_plans_for_every_hardware_file(
    command, hardware, tmp_path, planned
):
    files = [f"runs/{command.replace('-', '_')}"]
    if command not in ("prepare", "update-corpus"):
        files = ["models/tiny", f"hardware/{hardware}", *files]
    bindings = [f"--gin.{b}" for b in tiny_run.bindings(command, tmp_path)]
    batch = ["--gin.BATCH_SIZE=64"] if command == "finetune" else []
    found = planned(*plan_line(*files), *bindings, *batch)
    assert found["title"].startswith(command)
    if command in ("pretrain", "warm-start", "finetune"):
        assert found["sections"]["an update"]["takes"]["value"] > 0
        assert configuration.configured(HardwareConfig).trainer in found["title"]


STATED = """
from realm_jax.data import corpus_size
corpus_size.CorpusSize.num_blocks = 500
"""


@pytest.fixture
def planned_chain(tmp_path, launcher):
    """Plans a chain of tiny stages of which nothing has been made yet, by section."""
    tiny_run.make_inputs(tmp_path)

    def planned_chain(*stages, more="", given=()):
        file = tiny_run.write_chain(tmp_path, stages)
        file.write_text(file.read_text() + more)
        out, _ = launcher("plan", "--fast", "--json", f"--gin_file={file}", *given)
        return [plan["sections"] for plan in json.loads(out)["plans"]]

    return planned_chain


def test_a_chain_is_planned_for_the_corpus_that_it_will_prepare(planned_chain):
    prepared, trained = planned_chain("prepare", "pretrain")
    # Sixty articles of 40 words, in blocks of 40 wordpieces.
    blocks = prepared["disk"]["blocks"]
    assert 60 <= blocks["value"] <= 180
    assert trained["the index"]["blocks"]["value"] == blocks["value"]
    assert trained["the index"]["blocks"]["note"] == "of SOURCE, an estimate"
    # Six masks of a sentence are `prepare`'s, not a default.
    masked = 4 * (32 + 3 * 6 + 1) * 4
    assert trained["memory of a device"]["batch"]["value"] == masked
    # What is stated is believed.
    _, trained = planned_chain("prepare", "pretrain", more=STATED)
    assert trained["the index"]["blocks"]["value"] == 500
    # A builder is planned with the model of the stage before it.
    trained, built = planned_chain("pretrain", "build-index", more=STATED)
    for figure in ("blocks", "to embed them"):
        assert built["the index"][figure] == trained["the index"][figure]


def test_a_stage_is_planned_with_the_activation_of_what_its_start_will_be(
    tmp_path, monkeypatch, planned_chain
):
    """Weights with GELU, which no gin file names; no later stage reads them."""
    seen = {}

    def plan(command, config, setting):
        seen[command] = config.models.bert(vocab_size=9).activation
        return Plan(command, {})

    monkeypatch.setattr(
        commands, "PLANS", dict.fromkeys(("warm-start", "pretrain", "finetune"), plan)
    )
    write_bert(tmp_path / "published", SPECIAL_PIECES)
    weights = f'--gin.warm_start/WARM_START="{tmp_path / "published"}"'
    for given, activation in (([weights], "gelu"), ([], "gelu_tanh")):
        planned_chain("warm-start", "pretrain", "finetune", given=given)
        assert set(seen.values()) == {activation}
        assert len(seen) == 3


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
    hardware, mode, apart, oldest, planned
):
    files = plan_line("runs/pretrain_paper", f"hardware/{hardware}")
    found = planned(*files, *REQUIRED, f"--gin.REFRESH_MODE={mode}")
    assert not found["problems"]
    index = found["sections"]["the index"]
    assert index["oldest"]["value"] == pytest.approx(oldest, abs=1)
    if apart:
        assert index["a new index"]["value"] == apart
    page = (tiny_run.ROOT / "docs" / "pods.md").read_text()
    assert f" {oldest:,} |" in page


@pytest.mark.full
def test_the_papers_run_is_planned_in_a_table(launcher):
    out, _ = launcher(*PAPERS)
    mesh = "v4-64 (data x fsdp x model: 32 x 1 x 1), index builder on v4-16"
    # docs/pods.md says the last two.
    for part in (mesh, "1,291.8 TFLOP", "there is on its disk", "25.1 GiB", "2.1 GiB"):
        assert part in out.replace("\n", " "), out
    small = ['--gin.hardware.HardwareConfig.trainer="v2-8"', "--gin.BATCH_SIZE=64"]
    out, _ = launcher(*PAPERS, *small, code=2)
    assert "does not fit: MICROBATCHES=" in out


@pytest.mark.full
def test_what_was_chosen_is_a_gin_file_of_its_own(tmp_path, launcher):
    file = tmp_path / "plan.gin"
    auto = '--gin.bert.BertConfig.remat="auto"'
    launcher(*PAPERS, auto, f"--write={file}")
    configuration.parse(
        configuration.make_parser("", ""), [*PAPERS[2:], f"--gin_file={file}"]
    )
    config = configuration.configured(PretrainConfig)
    assert config.models.bert(vocab_size=9).remat == "dots"


REFUSED = {
    "expected the run file of a command": plan_line("hardware/v4_64"),
    "MODEL_DIR/macro.value": plan_line("runs/pretrain", "models/tiny"),
    "at least one --gin_file": ["plan"],
    "unknown command 'plans'": ["plans"],
    "got 'v4-63'": [*PAPERS, '--gin.hardware.HardwareConfig.trainer="v4-63"'],
    "expected BATCH_SIZE that 32": [*PAPERS, "--gin.BATCH_SIZE=100"],
    "expected a model file": [
        *plan_line("hardware/cpu", "runs/build_index"),
        *REQUIRED[:2],
    ],
    "model to divide num_heads": [*PAPERS, "--gin.partitioning.MeshConfig.model=32"],
    "multiply to the 32 devices": [*PAPERS, "--gin.partitioning.MeshConfig.fsdp=5"],
}


def test_bad_input_is_one_line(launcher):
    for said, arguments in REFUSED.items():
        _, err = launcher(*arguments, code=2)
        [line] = err.splitlines()
        assert said in line


def test_a_file_that_cannot_be_written_is_said_before_anything_is_planned(
    tmp_path, launcher, monkeypatch
):
    monkeypatch.setattr(
        "tpu_launch.plan.plan_command", lambda *_: pytest.fail("it was planned")
    )
    (tmp_path / "file").touch()
    for file in ("nowhere/plan.gin", "file/plan.gin", ""):
        _, err = launcher(*PAPERS, f"--write={tmp_path / file}", code=2)
        [line] = err.splitlines()
        assert f"expected a file that can be written, got {tmp_path}" in line


@pytest.mark.full
def test_examples_that_are_there_are_counted_as_they_are(tmp_path, planned):
    world = tiny_world.make(tmp_path)
    folder = tmp_path / "corpus/examples"
    found = sum(path.stat().st_size for path in (folder / "asked").rglob("*.*"))
    assert 0 < found < sum(path.stat().st_size for path in folder.rglob("*.*"))
    macros = {"CORPUS": world.corpus, "MODEL_DIR": tmp_path / "m", "TASK": "asked"}
    shown = planned(
        *plan_line("models/tiny", "hardware/cpu", "runs/pretrain"),
        *(f"--gin.{name}={value}" for name, value in macros.items()),
        REQUIRED[3],
        "--gin.BATCH_SIZE=64",
    )
    assert not shown["problems"]
    host = {name: one["value"] for name, one in shown["sections"]["a host"].items()}
    assert host["the examples on its disk"] == found
    # One host, and a folder: its checkpoints are there, too.
    kept = shown["sections"]["the model directory"]["in all"]["value"]
    assert host["MODEL_DIR on its disk"] == kept
    parts = ("the corpus on its disk", "the examples on its disk")
    assert host["on its disk, in all"] == kept + sum(host[name] for name in parts)
