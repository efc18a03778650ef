"""What workers of this machine find in a bundle, and what by its path."""

import subprocess

import pytest

from tpu_launch.bundle import make_bundle
from tpu_launch.local import on_local_worker


@pytest.mark.process("git lists what a bundle holds")
def test_what_git_ignores_is_named_by_its_path(tmp_path, monkeypatch):
    files = {
        ".gitignore": "/runs/\n",
        "gin/tracked.gin": "",
        "gin/new.gin": "",
        "runs/my/chain.gin": "",
        "runs/my/link.gin": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "gin" / "link.gin").symlink_to(tmp_path / "runs" / "my" / "link.gin")
    for command in ("init --quiet", "add .gitignore gin/tracked.gin gin/link.gin"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    given = [
        "build-index",
        "--gin_file=gin/tracked.gin",
        f"--gin_file={tmp_path}/gin/new.gin",
        # A link is not in the bundle either.
        "--gin_file=gin/link.gin",
        "--gin_file=runs/my/chain.gin",
        "--gin.SEED=1",
    ]
    assert on_local_worker(given, tmp_path, make_bundle(tmp_path)) == [
        "build-index",
        "--gin_file=gin/tracked.gin",
        "--gin_file=gin/new.gin",
        f"--gin_file={tmp_path}/gin/link.gin",
        f"--gin_file={tmp_path}/runs/my/chain.gin",
        "--gin.SEED=1",
    ]
