"""Models on a mesh: the same numbers, and placed where the axis table says."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import compiled

PROGRAM = pathlib.Path(__file__).parent / "sharded_models.py"


@pytest.mark.process("another number of devices")
def test_models_are_sharded_as_the_axis_table_says():
    result = subprocess.run(
        [sys.executable, PROGRAM],
        # The partitioner's warnings are wanted here, and only who compiles has them.
        env={**os.environ, **compiled.NOT_CACHED, "TF_CPP_MIN_LOG_LEVEL": "0"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "sharded as meant\n"
    # The partitioner's word for bringing a split array together on every device.
    assert "full rematerialization" not in result.stderr
