"""Defines chains of stages, and the standard one: text, warm start, REALM, answers.

A chain file sets macros: those of its own (see `Chain`) and those of the run files of
its stages. A macro that is named for a command, such as pretrain/BATCH_SIZE, is for
that command alone; any other is for all stages that have it. What follows from the root
of the chain and the name of its corpus need not be said.

The configurations of stages are read from gin as the commands of `realm` read them.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gin

from realm_jax import ranges
from realm_jax.cli import configuration, values
from realm_jax.errors import BadInputError
from realm_jax.stages import (
    BUILD_INDEX,
    EVALUATE,
    FINETUNE,
    PREPARE,
    PRETRAIN,
    STAGES,
    WARM_START,
    StageSpec,
)
from realm_jax.training.refresh import RefreshMode

_CONFIGURED = {command: spec for command, spec in STAGES.items() if spec.config}
# The file of a later stage also binds settings of an earlier one, as `evaluate` binds
# the configuration of `finetune`; the builder's file may be given beside its trainer's.
_LOOKED_FOR = [
    *(spec for spec in reversed(_CONFIGURED.values()) if spec is not BUILD_INDEX),
    BUILD_INDEX,
]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command of a chain.

    Attributes:
      command: command of `realm`, such as "pretrain".
      gin_files: passed with --gin_file, before the chain's own files.
      bindings: passed with --gin., such as 'MODEL_DIR="runs/x/pretrain"'.
      processes: number of processes that run it together, like the hosts of a slice.
      devices: simulated CPU devices of each process; with a single process and a single
        device it runs on the actual devices.
      companion: "build-index", which then runs as a job of its own until this one has
        ended and its last index is built; or "". The other attributes are of that
        command.
    """

    command: str
    gin_files: Sequence[str] = ()
    bindings: Sequence[str] = ()
    processes: int = 1
    devices: int = 1
    companion: str = ""
    companion_gin_files: Sequence[str] = ()
    companion_bindings: Sequence[str] = ()
    companion_processes: int = 1
    companion_devices: int = 1

    def __post_init__(self):
        numbers = ("processes", "devices", "companion_processes", "companion_devices")
        ranges.require_ranges(self, **dict.fromkeys(numbers, ranges.whole(1)))
        if self.companion not in ("", BUILD_INDEX.command):
            raise BadInputError(
                f"expected {BUILD_INDEX.command!r} or nothing beside {self.command}, "
                f"got {self.companion!r}"
            )

    @property
    def is_launched(self) -> bool:
        """True if it has more than one process, and so needs a launcher."""
        return bool(self.companion) or self.processes > 1


@dataclasses.dataclass(frozen=True)
class Chain:
    """Stages to run one after the other.

    Attributes:
      root: folder of the chain. Each standard stage has a folder there by its name, and
        the corpus is in "corpus", unless the macros of the chain file say otherwise.
      stages: the stages, in order: commands of the standard chain, or stages of one's
        own with all their files and bindings.
      name: of the standard chain: name of the corpus, as in `PrepareConfig`.
      model: of the standard chain: gin file of the model.
      hardware: of the standard chain: gin file of the hardware.
      weights: of the standard chain: published weights that its first training stage
        begins with, or a model directory, or "".
      processes: of the standard chain: number of processes that train together.
    """

    root: str
    stages: Sequence["str | Stage"]
    name: str = ""
    model: str = ""
    hardware: str = "gin/hardware/cpu.gin"
    weights: str = ""
    processes: int = 1

    def __post_init__(self):
        local = ranges.LOCAL_FOLDER._replace(advice="a MODEL_DIR may be in a bucket")
        ranges.require_ranges(self, root=local, processes=ranges.whole(1))
        standard = [stage for stage in self.stages if isinstance(stage, str)]
        for command in standard:
            if command not in _MACROS:
                raise BadInputError(
                    f"expected stages among {', '.join(_MACROS)}, got {command!r}; "
                    "others are given as @NAME/local.Stage()"
                )
        if standard and not (self.name and self.model):
            raise BadInputError(
                "expected local.Chain.name, the name of the corpus, and "
                "local.Chain.model, a gin file such as gin/models/minilm_l6.gin, for "
                f"the stages {', '.join(standard)}"
            )

    def all_stages(self) -> list[Stage]:
        """Returns the stages with their files and bindings; gin has read the chain."""
        return [
            self._standard(STAGES[stage]) if isinstance(stage, str) else stage
            for stage in self.stages
        ]

    def _standard(self, spec: StageSpec) -> Stage:
        model_files = [] if spec is PREPARE else [self.model, self.hardware]
        stage = Stage(
            spec.command,
            gin_files=[*model_files, _run_file(spec)],
            bindings=self._bindings(spec, _MACROS[spec.command]),
            processes=self.processes if spec.trains else 1,
        )
        usual = {PRETRAIN: RefreshMode.ASYNC.value}
        mode = _macro(f"{spec.name}/REFRESH_MODE") or usual.get(spec)
        if spec not in (PRETRAIN, FINETUNE) or mode != RefreshMode.ASYNC.value:
            return stage
        return dataclasses.replace(
            stage,
            companion=BUILD_INDEX.command,
            companion_gin_files=[self.hardware, _run_file(BUILD_INDEX)],
            companion_bindings=self._bindings(spec, _BUILDER),
        )

    def _bindings(self, spec: StageSpec, macros: Mapping[str, str]) -> list[str]:
        """Returns what follows from the chain and its file does not say itself."""
        following = {
            "root": self.root,
            "name": self.name,
            "weights": self.weights,
            "before": self._before(spec),
            "folder": self._folder(spec),
            # Published weights retrieve; from nothing ICT teaches it.
            "pairs": "" if self.weights else f"{self.name}_ict",
            **{
                stage.name: self._folder(stage) if stage.command in self.stages else ""
                for stage in (WARM_START, PRETRAIN, FINETUNE)
            },
        }
        return [
            f"{macro}={value}"
            for macro, template in macros.items()
            if _macro(f"{spec.name}/{macro}") is None and _macro(macro) is None
            if (value := template.format(**following))
        ]

    def _folder(self, spec: StageSpec) -> str:
        """Returns the model directory of a stage."""
        said = _macro(f"{spec.name}/MODEL_DIR")
        return said or f"{self.root.rstrip('/')}/{spec.name}"

    def _before(self, spec: StageSpec) -> str:
        """Returns what a stage starts from: the last stage that trained, or weights."""
        names = [stage for stage in self.stages if isinstance(stage, str)]
        earlier = [STAGES[name] for name in names[: names.index(spec.command)]]
        trained = [self._folder(stage) for stage in earlier if stage.trains]
        return trained[-1] if trained else self.weights


class ChainCommands:
    """The command lines of a chain's stages."""

    def __init__(
        self, chain: Chain, gin_files: Sequence[str], passed_on: Sequence[str] = ()
    ):
        """Expands a chain that gin has read, and reads the files of its stages.

        `gin_files` are passed to every stage after its own, and the arguments
        `passed_on` to each stage that reads them, after all others. One that no stage
        reads is refused.
        """
        self._gin_files, self._passed_on = gin_files, passed_on
        # Reading a stage's own files replaces what gin has read of the chain.
        self.stages = chain.all_stages()
        self._macros: set[str] = set()
        unread = set(passed_on)
        for stage in self.stages:
            unread -= {*self.main(stage), *self.companion(stage)}
        for argument in unread:
            name = values.name_of(argument.removeprefix("--gin."))
            reason = "no stage reads it, or the file of a stage overrides it"
            if name.rpartition("/")[2] not in self._macros:
                reason = values.meant(name, self._macros)
            raise BadInputError(
                f"{name} has no effect on any stage of this chain: {reason}"
            )

    def main(self, stage: Stage) -> list[str]:
        """Returns the arguments of `realm` for a stage itself."""
        return self._arguments(stage.command, stage.gin_files, stage.bindings)

    def companion(self, stage: Stage) -> list[str]:
        """Returns the arguments of `realm` for the command beside it; [] for none."""
        if not stage.companion:
            return []
        files, bindings = stage.companion_gin_files, stage.companion_bindings
        return self._arguments(stage.companion, files, bindings)

    def configure(self, stage: Stage) -> Any:
        """Has gin read what a stage itself reads; returns the configuration of that."""
        parser = configuration.make_parser(f"realm {stage.command}", None)
        configuration.parse(parser, self.main(stage)[1:], stage.command)
        return stage_config(stage.command)

    def _arguments(
        self, command: str, gin_files: Sequence[str], bindings: Sequence[str]
    ) -> list[str]:
        """Returns the arguments of `realm`, without those that it does not read."""
        arguments = [
            *(f"--gin_file={file}" for file in [*gin_files, *self._gin_files]),
            *(f"--gin.{binding}" for binding in bindings),
        ]
        if not self._passed_on:
            return [command, *arguments]
        parser = configuration.make_parser(f"realm {command}", None)
        given = [*arguments, *self._passed_on]
        _, unread = configuration.parse_chain(parser, given, command)
        self._macros |= values.macros()
        passed_on = [
            argument
            for argument in self._passed_on
            if argument.removeprefix("--gin.") not in unread
        ]
        return [command, *arguments, *passed_on]


# Macros of each standard stage; {warm_start}, say, is the folder of that stage.
_CORPUS = {"CORPUS": "{root}/corpus"}
_TRAINED = {"MODEL_DIR": "{folder}", **_CORPUS, "WARM_START": "{before}"}
_BUILDER = {"MODEL_DIR": "{folder}", **_CORPUS}
_MACROS: Mapping[str, Mapping[str, str]] = {
    PREPARE.command: {**_CORPUS, "NAME": "{name}"},
    WARM_START.command: {
        **_TRAINED,
        "TASK": "{name}_salient",
        "PAIRS_TASK": "{pairs}",
    },
    PRETRAIN.command: {**_TRAINED, "TASK": "{name}_salient"},
    FINETUNE.command: {**_TRAINED, "TASK": "{name}_questions"},
    EVALUATE.command: {
        "MODEL_DIR": "{folder}",
        **_CORPUS,
        "WARM_STARTED": "{warm_start}",
        "PRETRAINED": "{pretrain}",
        "FINETUNED": "{finetune}",
        "MASKED_TASK": "{name}_salient",
    },
}


def configured_stage() -> StageSpec:
    """Returns the command of `realm` whose run file gin has read."""
    for spec in _LOOKED_FOR:
        # Gin binds nothing in a module that none of its files has imported.
        if spec.config.rpartition(".")[0] not in sys.modules:
            continue
        # Every run file binds its corpus; other files only bind settings of training.
        if "corpus" in configuration.bindings(spec.load_config()):
            return spec
    raise BadInputError(
        "expected the run file of a command, got none; add "
        "--gin_file=gin/runs/pretrain.gin, say"
    )


def parse_run(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, StageSpec]:
    """Configures gin for the command of `realm` whose run file is among the gin files.

    Returns the flags and the command.
    """
    # What is named for the command is read once the command is known.
    configuration.parse_chain(parser, argv)
    stage = configured_stage()
    return configuration.parse(parser, argv, stage.command), stage


def stage_config(command: str) -> Any:
    """Returns the configuration that a command of `realm` would run with."""
    if command not in _CONFIGURED:
        raise BadInputError(
            f"expected a command among {', '.join(_CONFIGURED)}, got {command!r}"
        )
    return configuration.configured(_CONFIGURED[command].load_config())


def _run_file(spec: StageSpec) -> str:
    return f"gin/runs/{spec.name}.gin"


def _macro(name: str) -> str | None:
    """Returns a macro of the chain file that is a text."""
    try:
        value = gin.query_parameter(f"%{name}")
    except ValueError:
        return None
    return value if isinstance(value, str) else None
