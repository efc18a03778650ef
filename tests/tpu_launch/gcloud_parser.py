"""What the parser of the gcloud that is installed says of command lines."""

import json
import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence

import pytest


def complaints(
    command_lines: Sequence[Sequence[str]], folder: pathlib.Path
) -> list[str]:
    """Returns what is wrong with each line, "" where nothing is; runs none of them.

    A line is `gcloud` and its arguments, with flags as --flag=value, and comes once.
    """
    if not shutil.which("gcloud"):
        pytest.skip("needs gcloud")
    # Its linter takes what follows a flag for the flag's value.
    lines = [
        shlex.join(sorted(line, key=lambda word: word.startswith("--")))
        for line in command_lines
    ]
    assert len(set(lines)) == len(lines)
    file = folder / "command_lines.json"
    file.write_text(json.dumps([{"command_string": line} for line in lines]))
    said = subprocess.check_output(
        ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"],
        text=True,
        stderr=subprocess.DEVNULL,
    )
    found = json.loads(said)
    assert len(found) == len(lines)
    return [one["error_message"] or "" for one in found]
