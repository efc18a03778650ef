import os
import signal
import threading
import time

import pytest

from realm_jax.cli.main import main
from tests import tiny_run

pytestmark = pytest.mark.full


def test_ctrl_c_is_the_ordinary_end_of_an_evaluation_that_follows(
    finished, tmp_path, capsys
):
    folder = str(tmp_path / "evaluate")
    arguments = tiny_run.arguments("evaluate", finished, MODEL_DIR=folder)

    def interrupt_when_measured():
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and "waiting" not in "".join(said):
            said.append(capsys.readouterr().out)
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    said: list[str] = []
    interrupt = threading.Thread(target=interrupt_when_measured)
    interrupt.start()
    assert main([*arguments, "--gin.FOLLOW=True"]) == 0
    interrupt.join()
    assert f"the report is in {folder}/report.html" in "".join(said)
    assert (tmp_path / "evaluate" / "report.html").exists()
