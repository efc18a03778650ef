"""Replaces names of version 0.1 in gin files; they work until 0.3, with a warning.

A user's own gin files keep working after an upgrade: each old name is replaced as a
file is read, and one line names the replacement.
"""

import io
import logging
import os
import re
from typing import IO

import gin

# Old name -> new name, each a complete name in gin's syntax.
RENAMED = {
    "from tasks import prepare": "from realm_jax.prepare import prepare",
    "from tasks import update_corpus": "from realm_jax.prepare import update_corpus",
    "from realm_jax import hosts": "from realm_jax import multihost",
    "hosts.HostsConfig": "multihost.HostsConfig",
    "from tpu_launch import slices": "from realm_jax import hardware",
    "slices.HardwareConfig": "hardware.HardwareConfig",
    "from tpu_launch import job": "from realm_jax import hardware",
    "job.LaunchConfig": "hardware.LaunchConfig",
    "from tpu_launch.planner import corpus_size": (
        "from realm_jax.data import corpus_size"
    ),
    "ANOTHER_CORPUS": "ALLOW_CORPUS_MISMATCH",
    # Settings.
    "another_corpus": "allow_corpus_mismatch",
    "beside": "companion",
    "beside_gin_files": "companion_gin_files",
    "beside_bindings": "companion_bindings",
    "beside_processes": "companion_processes",
    "beside_devices": "companion_devices",
}


def _pattern(old: str) -> str:
    """Matches a name; a setting may follow the class that has it, no other name may."""
    is_setting = old.islower() and old.isidentifier()
    return rf"(?<!\w){'' if is_setting else '(?<![.])'}{re.escape(old)}(?!\w)"


_OLD = "|".join(map(_pattern, RENAMED))
# Text and comments are matched first, so that names in them, such as a path's, stay.
_TOKEN = re.compile(
    r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#.*'
    rf"|(?P<old>{_OLD})"
)
_log = logging.getLogger(__name__)


def current(text: str, where: str) -> str:
    """Returns gin's syntax, of a file or of the command line, with current names.

    `where` is its source, for the warning about each old name.
    """
    found: dict[str, None] = {}

    def replaced(match: re.Match[str]) -> str:
        old = match["old"]
        if old is None:
            return match.group()
        found[old] = None
        return RENAMED[old]

    text = _TOKEN.sub(replaced, text)
    for old in found:
        _log.warning("%s: %s is now %s; please change it.", where, old, RENAMED[old])
    return text


def read_gin_files_by_old_names() -> None:
    """Makes gin read all files, included ones too, through `current`."""
    # Readers that are registered come after gin's own, which opens every existing file.
    gin.config._FILE_READERS[:0] = [(_open, os.path.isfile)]


def _open(path: str) -> IO[str]:
    with open(path, encoding="utf-8") as file:
        text = io.StringIO(current(file.read(), path))
    text.name = path  # For gin's error messages.
    return text
