"""`python -m tpu_launch plan`: what a run needs, takes and costs, before it is started.

Give it the gin files of the run, its hardware file among them. Nothing is run. If the
compiler for the slice is available (`make tpu-compiler`, no TPU needed), the update,
the embedding job and the search are compiled; otherwise they are counted from their
shapes. Exit code 2: it does not fit; the last lines name a setting that would help.

An existing corpus is measured. Otherwise its size is that of CorpusSize, if a gin file
binds that; or an estimate from SOURCE, for `prepare` and later stages of its chain; or
that of the paper's Wikipedia.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from realm_jax.cli import bert_settings, configuration
from realm_jax.data.corpus_size import CorpusSize, of_corpus
from realm_jax.errors import BadInputError
from realm_jax.hardware import HardwareConfig
from realm_jax.stages import (
    ASK,
    BUILD_INDEX,
    EVALUATE,
    PREPARE,
    STAGES,
    StageSpec,
)
from realm_jax.training.initialization import ModelFactory, recorded_activation
from tpu_launch.chain import Chain, ChainCommands, parse_run, stage_config
from tpu_launch.planner.figures import Plan, as_json, show
from tpu_launch.status import unless_stopped

DOES_NOT_FIT = 2


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0, or 2 if something does not fit."""
    parser = configuration.make_parser("python -m tpu_launch plan", __doc__)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="count everything from shapes, compile nothing (seconds, not minutes)",
    )
    parser.add_argument("--json", action="store_true", help="figures in plain units")
    parser.add_argument(
        "--write",
        metavar="FILE",
        type=pathlib.Path,
        help='a gin file to write with what was chosen, such as of remat="auto"; give '
        "it to the run as its last --gin_file",
    )
    flags, _ = configuration.parse_chain(parser, argv)
    if flags.write:
        _require_writable(flags.write)
    screen = Console(stderr=True)

    def say(text: str) -> None:
        screen.print(f"[dim]{text} ...[/dim]", highlight=False)

    plans = unless_stopped(
        lambda: _plans(flags, say), stop, "stopped; nothing was written"
    )
    currency = configuration.configured_if_bound(HardwareConfig).currency
    if flags.json:
        print(as_json(plans, currency))
    else:
        show(plans, currency, Console())
    if flags.write:
        _write(flags.write, plans)
    return DOES_NOT_FIT if any(plan.problems for plan in plans) else 0


def _plans(flags: argparse.Namespace, say: Callable[[str], None]) -> list[Plan]:
    compiles, given = not flags.fast, [f"--gin.{one}" for one in flags.bindings]
    if not configuration.bindings(Chain):
        parser = configuration.make_parser("python -m tpu_launch plan", None)
        files = [f"--gin_file={file}" for file in flags.gin_file]
        _, stage = parse_run(parser, [*files, *given])
        return [plan_command(stage.command, compiles, say)]
    chain = configuration.configured(Chain)
    commands = ChainCommands(chain, flags.gin_file, given)
    plans, made = [], Made()
    for stage in commands.stages:
        commands.configure(stage)
        plans.append(plan_command(stage.command, compiles, say, made))
    return plans


@dataclasses.dataclass(frozen=True)
class Made:
    """What the stages of a chain make that have been planned so far.

    Attributes:
      corpora: folder of a corpus -> its expected size.
      models: model directory -> its models.
    """

    corpora: dict[str, CorpusSize] = dataclasses.field(default_factory=dict)
    models: dict[str, ModelFactory] = dataclasses.field(default_factory=dict)

    def activation(self, source: str) -> str | None:
        """Returns the activation of the encoders in a source; asks no bucket for it."""
        if source in self.models:
            return self.models[source].bert(vocab_size=1, remat="none").activation
        return None if "://" in source else recorded_activation(source)

    def size(self, stage: StageSpec, config: Any) -> CorpusSize:
        """Returns the size of the corpus of a stage, as it is or will be."""
        from realm_jax.prepare.expected_size import expected_size

        # Workers of a stage copy no other examples (`run.unread_examples`).
        measured = of_corpus(config.corpus, config.tasks if stage.trains else None)
        if measured or configuration.bindings(CorpusSize):
            return measured or configuration.configured(CorpusSize)
        if stage is PREPARE and (expected := expected_size(config)):
            self.corpora[config.corpus] = expected
        return self.corpora.get(config.corpus, CorpusSize())


def plan_command(
    command: str, compiles: bool, say: Callable[[str], None], made: Made | None = None
) -> Plan:
    """Plans a command of `realm` with its configuration in gin.

    What earlier stages of a chain make is in `made`; what this one makes is added.
    """
    from realm_jax.index.embed import EmbedConfig
    from tpu_launch.planner import commands
    from tpu_launch.planner.devices import Setting

    config, made = stage_config(command), made or Made()
    stage = STAGES[command]
    size = made.size(stage, config)
    if stage.trains or stage in (EVALUATE, ASK):
        config = bert_settings.follow_weights(config, made.activation)
    if stage.trains:
        made.models[config.model_dir] = config.models
    hardware = configuration.configured_if_bound(HardwareConfig)
    if stage in (BUILD_INDEX, EVALUATE, ASK):
        # They have no backward pass, so there is no memory by which to choose.
        bert_settings.require_decided_remat()
    chooses_remat = stage.trains and bert_settings.remat_is_undecided()
    setting = Setting(size, hardware, compiles, say, chooses_remat)
    if stage is not BUILD_INDEX:
        return commands.PLANS[command](command, config, setting)
    models = made.models.get(config.model_dir)
    if models is None and not configuration.bindings(ModelFactory):
        raise BadInputError(
            "expected a model file, for the builder reads its model from the "
            "retriever's snapshot; add --gin_file=gin/models/base.gin, say"
        )
    models = models or configuration.configured(ModelFactory)
    embed = configuration.configured(EmbedConfig)
    if config.model_dir in made.models:
        # As the builder does once its trainer has published a retriever.
        embed = embed.at_length(models.lengths.document)
    return commands.build_index(models, embed, setting)


def _require_writable(file: pathlib.Path) -> None:
    """Requires a file that can be written, before minutes of planning."""
    place = file if file.exists() else file.parent
    if file.is_dir() or not file.parent.is_dir() or not os.access(place, os.W_OK):
        raise _unwritable(file)


def _unwritable(file: pathlib.Path) -> BadInputError:
    return BadInputError(
        f"expected a file that can be written, got {file}; give another --write"
    )


def _write(file: pathlib.Path, plans: Sequence[Plan]) -> None:
    lines = [
        "# Chosen by `python -m tpu_launch plan`.",
        "from __gin__ import dynamic_registration",
        "from realm_jax.models import bert",
        *(f"{n} = {v}" for plan in plans for n, v in plan.bindings.items()),
    ]
    try:
        file.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise _unwritable(file) from error
    print(f"wrote {file}", file=sys.stderr)
