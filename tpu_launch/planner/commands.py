"""Plans each command of `realm`."""

import dataclasses
from collections.abc import Callable, Mapping

from realm_jax.cli import bert_settings
from realm_jax.data.blocks import HASH_BYTES
from realm_jax.evaluation.ask import AskConfig
from realm_jax.evaluation.run import EvaluateConfig
from realm_jax.index import device_search
from realm_jax.index.builder import BuilderConfig
from realm_jax.index.device_search import Precision
from realm_jax.index.embed import EmbedConfig
from realm_jax.prepare.prepare import PrepareConfig
from realm_jax.prepare.update_corpus import UpdateConfig
from realm_jax.stages import ASK, EVALUATE, PREPARE, STAGES, UPDATE_CORPUS
from realm_jax.training.checkpoints import KEPT_CHECKPOINTS
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.refresh import RefreshMode
from realm_jax.training.stage_config import StageConfig
from realm_jax.training.warm_start import WarmStartConfig
from tpu_launch.planner import costs, devices, memory, programs
from tpu_launch.planner.devices import Setting
from tpu_launch.planner.figures import Line, Plan, Unit, in_all, value_of, with_limit
from tpu_launch.planner.programs import Training
from tpu_launch.slices import Slice

# For a corpus whose settings are in another configuration.
_CHUNK_LENGTH = 288
_FLOAT = 4
_GIB = 1 << 30
# ScaNN keeps for each block: its row in float32, a code of half a byte per two
# dimensions, and the leaf it belongs to.
_SCANN_LEAF = 8


def training(command: str, config: StageConfig, setting: Setting) -> Plan:
    """Returns the plan of a training stage."""
    found = devices.of_training(config, setting)
    config, length = found.config, config.models.lengths.document
    sections = {"memory of a device": found.lines()}
    work, step_seconds = costs.update_lines(found, setting)
    sections["an update"] = work
    index, embed_seconds, hints = _index(config, setting, step_seconds)
    if index:
        sections["the index"] = index
    host, problems_of_host = _host(config, found.stage, setting)
    bucket = _bucket_lines(config, found.stage, setting)
    is_on_disk = setting.num_hosts == 1 and "://" not in config.model_dir
    examples = _examples(setting, length, config)
    disk, too_full = _disk(
        setting, length, examples, bucket[-1] if is_on_disk else None
    )
    sections["a host"] = [*host, *disk]
    sections["the model directory"] = bucket
    if _is_float32(config) and setting.trainer.chip is not None:
        hints = [
            "activations are float32: for bfloat16, give the hardware file after those "
            "of the model and of the run, or set DTYPE",
            *hints,
        ]
    seconds = config.train_steps * step_seconds
    if config.index_use is not None:
        seconds += embed_seconds * config.index_use.blocking_rebuilds
    sections["the run"] = _run(config, setting, seconds)
    problems = [] if found.fits else [devices.advice(config, setting)]
    problems += costs.problems(index, _embedding_machines(config, setting))
    chosen = {}
    if setting.chooses_remat and found.fits:
        chosen[bert_settings.REMAT] = f'"{memory.encoder_of(config).remat}"'
    return Plan(
        f"{command} on {_machines(config, setting)}",
        sections,
        [*problems, *problems_of_host, *too_full],
        hints,
        chosen,
    )


def _is_float32(config: StageConfig) -> bool:
    # An encoder of one's own may not have the setting.
    return getattr(memory.encoder_of(config), "dtype", "") == "float32"


def build_index(models: ModelFactory, embed: EmbedConfig, setting: Setting) -> Plan:
    """Returns the plan of the index builder."""
    towers = models.retriever_config(setting.corpus.vocab_size)
    machines = setting.builder
    disk, too_full = _disk(setting, embed.document_length)
    index = _index_bytes(towers.projection_size, setting)
    lines = costs.embedding_lines(towers, embed, machines, setting)
    return Plan(
        f"build-index on {machines.accelerator_type}",
        {
            "the index": lines,
            "the model directory": [Line("one index", index, Unit.BYTES)],
            "a host": disk,
        },
        [*costs.problems(lines, machines), *too_full],
    )


def reading(command: str, config: EvaluateConfig | AskConfig, setting: Setting) -> Plan:
    """Returns the plan of `evaluate` or `ask`: an index, and reading with it."""
    finetuned = config.finetuned
    assert isinstance(finetuned, FinetuneConfig)  # As gin gives it.
    towers = finetuned.models.retriever_config(setting.corpus.vocab_size)
    # These commands use one device, whatever the machine has.
    mesh = memory.one_device()
    one_question = dataclasses.replace(finetuned, batch_size=1)
    stage = programs.training(one_question, setting.corpus, mesh)
    held = [Line("parameters", memory.num_bytes(stage.state.params), Unit.BYTES)]
    if config.searcher == "device":
        table = device_search.table_shapes(
            setting.corpus.num_blocks, towers.projection_size, mesh, Precision.FLOAT32
        )
        held.append(Line("embeddings", memory.num_bytes(table), Unit.BYTES))
    limit, total = devices.usable(setting.trainer), in_all(held)
    note = "without the blocks that are read"
    embed = config.embed.at_length(finetuned.models.lengths.document)
    lines = costs.embedding_lines(towers, embed, setting.trainer, setting)
    length = embed.document_length
    disk, too_full = _disk(setting, length, _examples(setting, length))
    problems = [*costs.problems(lines, setting.trainer), *too_full]
    if total > limit:
        problems.append('SEARCHER="scann" would do: it searches on the host')
    return Plan(
        f"{command} on {setting.hardware.trainer}",
        {
            "memory of the device": with_limit(held, limit, "for programs", note),
            "the index, where there is none yet": lines,
            "a host": disk,
        },
        problems,
    )


def preparing(
    command: str, config: PrepareConfig | UpdateConfig, setting: Setting
) -> Plan:
    """Returns the plan of `prepare` or `update-corpus`: the space it takes."""
    length = getattr(config, "chunk_length", _CHUNK_LENGTH)
    disk = setting.corpus.disk_bytes(length)
    lines = [
        Line("blocks", setting.corpus.num_blocks, Unit.COUNT),
        Line("the corpus", disk, Unit.BYTES),
        Line("its examples", setting.corpus.examples_bytes(length), Unit.BYTES),
        Line("parts in SCRATCH, while it is made", disk, Unit.BYTES),
    ]
    return Plan(f"{command} on any machine", {"disk": lines})


PLANS: Mapping[str, Callable[..., Plan]] = {
    **dict.fromkeys((PREPARE.command, UPDATE_CORPUS.command), preparing),
    **dict.fromkeys((EVALUATE.command, ASK.command), reading),
    **{command: training for command, spec in STAGES.items() if spec.trains},
}
"""Maps a command to a function of (command, configuration, setting) that returns its
plan. `build_index` is separate, as the builder's configuration has no model."""


def _index(
    config: StageConfig, setting: Setting, step_seconds: float
) -> tuple[list[Line], float, list[str]]:
    """Returns lines on a stage's index, the seconds of a refresh, and hints."""
    use = config.index_use
    if use is None:
        return [], 0.0, []
    towers = config.models.retriever_config(setting.corpus.vocab_size)
    machines = _embedding_machines(config, setting)
    lines = costs.embedding_lines(towers, use.embed, machines, setting)
    seconds = value_of(lines, "a refresh takes")
    if use.refresh is None or not isinstance(config, PretrainConfig | FinetuneConfig):
        return lines, seconds, []
    compiles = setting.compiles and memory.has_compiler(setting.trainer)
    if isinstance(config, PretrainConfig) and use.is_in_step and compiles:
        lines.append(_search_line(config, setting))
    more, hints = costs.refresh_lines(config, seconds, step_seconds, setting.hardware)
    return lines + more, seconds, hints


def _search_line(config: PretrainConfig, setting: Setting) -> Line:
    hardware = setting.hardware
    mesh = memory.compiler_mesh(setting.trainer, config.mesh, hardware.trainer_slices)
    setting.say(f"compiling the search for {hardware.trainer}")
    towers = config.models.retriever_config(setting.corpus.vocab_size)
    function, arguments = programs.search(
        setting.corpus.num_blocks,
        towers.projection_size,
        config.batch_size,
        config.num_candidates,
        config.device,
        mesh,
    )
    needed = memory.compiled(function, arguments, mesh)
    note = "temporaries of a device, compiled"
    return Line("searching it takes", needed.num_bytes, Unit.BYTES, note)


def _has_builder(config: StageConfig) -> bool:
    return config.index_use is not None and config.index_use.has_builder


def _embedding_machines(config: StageConfig, setting: Setting) -> Slice:
    return setting.builder if _has_builder(config) else setting.trainer


def _run(config: StageConfig, setting: Setting, seconds: float) -> list[Line]:
    hardware = setting.hardware
    lines = [
        Line("updates", config.train_steps, Unit.COUNT),
        Line("takes", seconds, Unit.SECONDS, "preemptions come on top"),
    ]
    prices = [setting.trainer.hourly_price(hardware)] * hardware.trainer_slices
    if _has_builder(config) and hardware.builder:
        prices.append(setting.builder.hourly_price(hardware))
    known = [price for price in prices if price is not None]
    if len(known) == len(prices):
        an_hour = sum(known)
        note = f"{an_hour:,.2f} {hardware.currency} an hour"
        lines.append(Line("costs", an_hour * seconds / 3600, Unit.MONEY, note))
    return lines


def _machines(config: StageConfig, setting: Setting) -> str:
    hardware = setting.hardware
    trainer = hardware.trainer
    if hardware.trainer_slices > 1:
        trainer = f"{hardware.trainer_slices} x {trainer}"
    mesh = " x ".join(map(str, setting.mesh_shape(config.mesh)))
    beside = ""
    if _has_builder(config) and hardware.builder:
        beside = f", index builder on {hardware.builder}"
    return f"{trainer} (data x fsdp x model: {mesh}){beside}"


def _index_bytes(dimension: int, setting: Setting) -> int:
    """Returns the bytes of one published index."""
    return setting.corpus.num_blocks * (dimension * _FLOAT + HASH_BYTES)


def _host(
    config: StageConfig, stage: Training, setting: Setting
) -> tuple[list[Line], list[str]]:
    """Returns lines on the memory of each host of a trainer, and what does not fit."""
    num_blocks, state = setting.corpus.num_blocks, stage.state
    towers = config.models.retriever_config(setting.corpus.vocab_size)
    whole = memory.num_bytes((state.params, state.optimizer_state, state.key))
    share = -(-whole // setting.num_hosts)
    lines = [
        Line("state, whole, at the start", whole, Unit.BYTES, "of every host"),
        Line("checkpoint under way", share, Unit.BYTES, "its share"),
    ]
    rows = num_blocks * towers.projection_size * _FLOAT
    use = config.index_use
    if use is not None and use.searcher == "scann":
        codes = num_blocks * (towers.projection_size // 4 + _SCANN_LEAF)
        copies = 1 if use.refresh is None else 2
        note = "and the next one" if copies == 2 else ""
        lines.append(Line("ScaNN", copies * (rows + codes), Unit.BYTES, note))
    elif use is not None and use.is_in_step:
        share = -(-rows // setting.num_hosts)
        lines.append(Line("index while it is loaded", share, Unit.BYTES, "its share"))
    if isinstance(config, WarmStartConfig) and config.bm25_weight:
        lines.append(Line("embeddings beside BM25", rows, Unit.BYTES, "of every block"))
    if isinstance(config, FinetuneConfig) and not config.index_in_state:
        size, note = rows, "at most"
        if use is not None and use.refresh is not None:
            size, note = 2 * rows, "at most, and the next"
        lines.append(Line("embeddings of what was found", size, Unit.BYTES, note))
    total, limit = in_all(lines), setting.trainer.host_memory
    problem = "the memory of a host: see there; spread the run over more"
    shown = with_limit(lines, limit, "of each host")
    return shown, [problem] if total > limit else []


def _examples(
    setting: Setting, document_length: int, config: StageConfig | None = None
) -> Line:
    """Returns the line on the examples on a host: of the stage's tasks, or of all."""
    corpus = setting.corpus
    whose = "all tasks" if config is None else " and ".join(config.tasks)
    reads_spans = config is None or isinstance(config, PretrainConfig)
    reads_pairs = config is None
    if isinstance(config, WarmStartConfig):
        reads_spans, reads_pairs = bool(config.task), bool(config.pairs_task)
    size = corpus.examples_bytes(document_length, spans=reads_spans, pairs=reads_pairs)
    note = f"of {whose}" if corpus.examples else f"of {whose}, an estimate"
    return Line("the examples on its disk", size, Unit.BYTES, note)


def _disk(
    setting: Setting,
    document_length: int,
    examples: Line | None = None,
    model_dir: Line | None = None,
) -> tuple[list[Line], list[str]]:
    """Returns lines on the disk of each host, and what does not fit there.

    Examples are left out where there are none, and the model directory, by the line on
    all of it, where it is elsewhere.
    """
    corpus, room = setting.corpus, setting.hardware.host_disk_gib * _GIB
    size = corpus.disk_bytes(document_length)
    lines = [Line("the corpus on its disk", size, Unit.BYTES, "mapped into memory")]
    if examples:
        lines.append(examples)
    if model_dir:
        name, note = "MODEL_DIR on its disk", "at most; see below"
        lines.append(Line(name, model_dir.value, Unit.BYTES, note))
    total = in_all(lines)
    lines.append(Line("on its disk, in all", total, Unit.BYTES))
    if not room:
        return lines, []
    lines.append(Line("there is on its disk", room, Unit.BYTES, "as stated"))
    if total <= room:
        return lines, []
    return lines, [
        f"the disk of a host would hold {total / _GIB:,.1f} GiB and has "
        f"{setting.hardware.host_disk_gib:,.1f} (hardware.HardwareConfig."
        "host_disk_gib); use larger ones and say so there, or prepare again the tasks "
        "that an earlier release prepared"
    ]


def _bucket_lines(config: StageConfig, stage: Training, setting: Setting) -> list[Line]:
    """Returns lines on the maximum space of MODEL_DIR, the last one on all of it."""
    kept_checkpoints, best = KEPT_CHECKPOINTS, ""
    is_measured = (
        isinstance(config, PretrainConfig) and config.held_out_examples > 0
    ) or (isinstance(config, FinetuneConfig) and config.questions != "")
    if is_measured:
        kept_checkpoints, best = kept_checkpoints + 1, ", the best,"
    size = (kept_checkpoints + 1) * memory.num_bytes(stage.state)
    note = f"{KEPT_CHECKPOINTS}{best} and the one being written"
    lines = [Line("checkpoints", size, Unit.BYTES, note)]
    towers = config.models.retriever_config(setting.corpus.vocab_size)
    index = _index_bytes(towers.projection_size, setting)
    use = config.index_use
    if use is not None and use.refresh is None:
        lines.append(Line("index", index, Unit.BYTES))
    elif use is not None:
        kept = BuilderConfig.keep
        # The newest, those of kept checkpoints, and one attempt.
        indexes = 1 if use.refresh is RefreshMode.OFF else kept
        indexes += kept_checkpoints + 1
        lines.append(Line("indexes", indexes * index, Unit.BYTES, f"at most {indexes}"))
    if use is not None and use.has_builder:
        size = (kept + 1) * memory.num_bytes(stage.state.params["retriever"])
        note = f"{kept} and the one being written"
        lines.append(Line("retrievers", size, Unit.BYTES, note))
    return [*lines, Line("in all", in_all(lines), Unit.BYTES)]
