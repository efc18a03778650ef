"""Finds and describes the settings that a command reads.

Gin binds whatever it is told to: a macro that no setting reads any more, or a setting
in a scope that nothing uses, changes nothing and is no error. What is read can be told
without running anything: from the classes that a command configures, by the references
in their bindings.

What a setting means stands in the docstring of the dataclass that has it, and nowhere
else; the run file gives it a short name and a value.
"""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import gin

from realm_jax.stages import STAGES, StageSpec

_MACRO = "gin.macro"
_EVERY_PROCESS = ("realm_jax.multihost.HostsConfig",)
# Also passed to the commands that are launched, which do not read them.
_LAUNCHER = (
    "realm_jax.data.corpus_size.CorpusSize",
    "realm_jax.hardware.HardwareConfig",
    "realm_jax.hardware.LaunchConfig",
    "tpu_launch.local.Chain",
)
_PLANNER = (
    "realm_jax.index.embed.EmbedConfig",
    "realm_jax.training.initialization.ModelFactory",
)
_OURS = ("realm_jax.", "tpu_launch.")
# What a command line can say, and not an object.
_PLAIN = (bool, int, float, str, tuple, type(None))
_WIDTH = 80
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n   .*)*)", re.MULTILINE)


class Setting(NamedTuple):
    """A parameter of a configurable in a scope; a macro is one in a scope of its name.

    Attributes:
      scope: names joined by slashes, or "".
      selector: complete name of the configurable, such as
        "realm_jax.training.pretrain.PretrainConfig".
    """

    scope: str
    selector: str
    parameter: str

    @classmethod
    def macro(cls, name: str) -> "Setting":
        """Returns the setting that a macro is."""
        return cls(name, _MACRO, "value")

    @property
    def is_macro(self) -> bool:
        """True for a macro."""
        return self.selector == _MACRO

    @property
    def binding(self) -> str:
        """Its name on a command line, such as "pretrain.PretrainConfig.seed"."""
        if self.is_macro:
            return self.scope
        short = ".".join(self.selector.split(".")[-2:])
        scope = f"{self.scope}/" if self.scope else ""
        return f"{scope}{short}.{self.parameter}"


def class_of(selector: str) -> Any:
    """Returns the class or function that gin configures by this complete name."""
    made = gin.get_configurable(selector)
    return getattr(made, "__wrapped__", made)


def parse_setting(binding: str) -> Setting:
    """Returns the setting that the left side of a binding names.

    Raises:
      ValueError: there is no such configurable or parameter.
    """
    if "." not in binding:
        return Setting.macro(binding)
    key = gin.config.ParsedBindingKey.parse(binding)
    return Setting(key.scope, key.complete_selector, key.arg_name)


def settings() -> Iterator[tuple[Setting, Any]]:
    """Yields every setting with the value that is bound to it."""
    # Gin's own function prints the configuration; there is none that returns it.
    for (scope, selector), values in gin.config._CONFIG.items():
        for parameter, value in values.items():
            yield Setting(scope, selector, parameter), value


def macros_in(value: Any) -> set[str]:
    """Returns the names of the macros in a value."""
    return {
        "/".join(reference.scopes)
        for reference in gin.config.iterate_references(value)
        if reference.configurable.selector == _MACRO
    }


def readers(macro: str) -> list[Setting]:
    """Returns the settings whose value is this macro, or a macro that is this one."""
    found: list[Setting] = []
    pending, seen = [macro], {macro}
    while pending:
        name = pending.pop()
        for setting, value in settings():
            if name not in macros_in(value):
                continue
            if not setting.is_macro:
                found.append(setting)
            elif setting.scope not in seen:
                seen.add(setting.scope)
                pending.append(setting.scope)
    return found


def without_effect(given: Iterable[Setting], command: str = "") -> list[Setting]:
    """Returns those settings that a command does not read, in the order given.

    With a command of "" that is by all of them and the launcher. The index builder is
    given what its trainer is given, so it counts as all of them. Settings of a user's
    own configurables count as read, for their code may read them.
    """
    read = _read_from(_roots(command))
    return [
        setting
        for setting in given
        if setting not in read
        and (setting.is_macro or setting.selector.startswith(_OURS))
    ]


def _roots(command: str) -> list[str]:
    chosen = [STAGES[command]] if command else list(STAGES.values())
    if any(spec.others_are_passed_on for spec in chosen):
        chosen = list(STAGES.values())
    roots = [name for spec in chosen for name in spec.configs]
    return [*roots, *_EVERY_PROCESS, *_LAUNCHER, *(() if command else _PLANNER)]


def _read_from(roots: Sequence[str]) -> set[Setting]:
    """Returns the settings that are read when these classes are made, unscoped."""
    bound = dict(settings())
    by_place: dict[tuple[str, str], list[Setting]] = {}
    for setting in bound:
        by_place.setdefault((setting.scope, setting.selector), []).append(setting)
    found: set[Setting] = set()
    pending: list[tuple[tuple[str, ...], str]] = [((), root) for root in roots]
    # A user's own code may read the settings of their own configurables.
    pending += [
        (tuple(filter(None, scope.split("/"))), selector)
        for scope, selector in by_place
        if selector != _MACRO and not selector.startswith(_OURS)
    ]
    seen = set()
    while pending:
        scope, selector = place = pending.pop()
        if place in seen or (selector == _MACRO and not scope):
            continue
        seen.add(place)
        # Of two bindings gin takes the one in the innermost scope.
        read = {
            setting.parameter: setting
            for depth in range(len(scope) + 1)
            for setting in by_place.get(("/".join(scope[:depth]), selector), ())
        }
        found.update(read.values())
        for setting in read.values():
            for reference in gin.config.iterate_references(bound[setting]):
                inner = tuple(reference.scopes) or scope
                pending.append((inner, reference.configurable.selector))
    return found


def settings_help(spec: StageSpec, run_file: str) -> str:
    """Returns the settings of a stage: name, value in its run file, and meaning."""
    gin.clear_config(clear_constants=True)
    gin.parse_config_file(run_file)
    bound = dict(settings())
    lines = ["Settings, --gin.NAME=VALUE:"]
    for setting, value in bound.items():
        if setting.is_macro:
            lines += _described(setting.scope, _shown(value), _doc(spec, setting))
    for selector in spec.configs:
        config = class_of(selector)
        docs = field_docs(config)
        for field in dataclasses.fields(config):
            is_bound = Setting("", selector, field.name) in bound
            is_plain = isinstance(field.default, _PLAIN)
            if field.name in docs and not is_bound and is_plain:
                name = field.name.upper()
                lines += _described(name, _shown(field.default), docs[field.name])
    return "\n".join(lines)


def field_docs(config: type) -> dict[str, str]:
    """Returns what the docstrings of a class and its bases say of each attribute."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        _, _, attributes = text.partition("\nAttributes:\n")
        for name, doc in _ENTRY.findall(attributes):
            found[name] = " ".join(doc.split())
    return found


def _doc(spec: StageSpec, macro: Setting) -> str:
    """Returns the docstring of what a macro sets, of the stage's own where it can."""
    own = field_docs(class_of(spec.config))
    all_readers = readers(macro.scope)
    for reader in all_readers:
        if reader.selector == spec.config:
            return own[reader.parameter]
    if macro.scope.lower() in own:
        return own[macro.scope.lower()]
    return field_docs(class_of(all_readers[0].selector))[all_readers[0].parameter]


def _described(name: str, value: str, doc: str) -> Iterator[str]:
    yield f"  {name}{value}"
    yield from textwrap.wrap(
        doc, _WIDTH, initial_indent="      ", subsequent_indent="      "
    )


def _shown(value: Any) -> str:
    """Returns a value as gin files have it."""
    if repr(value) == "%gin.REQUIRED":
        return " (required)"
    return f" = {json.dumps(value) if isinstance(value, str) else repr(value)}"
