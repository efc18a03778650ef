"""The startup script of a worker: the bundle onto its disk, then the supervisor.

Cloud TPU runs it as root on every host of a slice, at every boot. What it did before is
there after a reboot, so it does only what is missing.
"""

import shlex
from collections.abc import Mapping, Sequence

_SCRIPT = """\
#!/bin/bash
# {name}
set -euo pipefail
export HOME=/root
checkout=/opt/realm/{digest}
if [ ! -e "$checkout/.installed" ]; then
  mkdir -p "$checkout"
  gcloud storage cp {url} /opt/realm/bundle.tar.gz
  echo "{digest}  /opt/realm/bundle.tar.gz" | sha256sum --check
  tar --extract --gzip --file=/opt/realm/bundle.tar.gz --directory="$checkout"
  if ! command -v python3.11 > /dev/null || ! command -v make > /dev/null; then
    apt-get --option=DPkg::Lock::Timeout=600 update
    apt-get --option=DPkg::Lock::Timeout=600 install --yes \\
      make python3.11 python3.11-venv
  fi
  make --directory="$checkout" env
  "$checkout/.venv/bin/uv" pip install --python "$checkout/.venv/bin/python" \\
    --no-deps --require-hashes --requirement "$checkout/requirements-tpu.lock"
  touch "$checkout/.installed"
fi
{fetch}cd "$checkout"
exec {command}
"""


def startup_script(
    *,
    name: str,
    run: str,
    role: str,
    attempt: int,
    slices: int,
    hosts: int,
    model_dir: str,
    bundle_url: str,
    bundle_digest: str,
    deadline: int,
    fetch: Mapping[str, str],
    command: Sequence[str],
) -> str:
    """Returns the script that every host of an attempt runs.

    Args:
      name: of the slices, for whoever reads it.
      run: id of the run.
      role: "trainer" or "builder".
      attempt: number of the attempt.
      slices: that work together.
      hosts: of each slice.
      model_dir: where state, logs and the done marker go.
      bundle_url: of the bundle, on gs://.
      bundle_digest: sha256 of the bundle.
      deadline: when the supervisor ends, in Unix seconds.
      fetch: gs:// folder -> folder of the worker.
      command: arguments of `realm`.
    """
    supervisor = [
        *(".venv/bin/python", "-m", "tpu_launch.supervisor"),
        f"--model_dir={model_dir}",
        f"--run={run}",
        f"--role={role}",
        f"--attempt={attempt}",
        f"--slices={slices}",
        f"--hosts={hosts}",
        f"--deadline={deadline}",
        "--",
        *(".venv/bin/realm", *command),
    ]
    copies = [
        f"mkdir -p {shlex.quote(folder)}\n"
        f"gcloud storage rsync --recursive {shlex.quote(url)} {shlex.quote(folder)}\n"
        for url, folder in fetch.items()
    ]
    return _SCRIPT.format(
        name=name,
        digest=bundle_digest,
        url=shlex.quote(bundle_url),
        fetch="".join(copies),
        command=shlex.join(supervisor),
    )
