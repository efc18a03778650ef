"""Builds the startup script of a TPU VM: installs the code, runs the worker.

Cloud TPU runs it as root on every host of a slice, at every boot. Completed work
remains after a reboot, so the script only does what is missing. It gives the slices
back when their work has ended and at the deadline, so that nobody need be there.
"""

import shlex
from collections.abc import Mapping

from tpu_launch.records import outcome_name
from tpu_launch.run import Role, Run

HOME = "/opt/realm"
"""Folder of code and logs on a TPU VM."""

_GIN_FILE = "--gin_file="

_SCRIPT = """\
#!/bin/bash
# {name}
set -euo pipefail
export HOME=/root DEBIAN_FRONTEND=noninteractive PATH="$PATH:/snap/bin"
home={home}
checkout="$home"/{digest}

give_back() {{
  until gcloud compute tpus queued-resources delete {name} --project={project} \\
    --zone={zone} --force --quiet --async; do sleep 60; done
}}

# Lists of apt, registries and the server of credentials are locked or unavailable at
# times, mostly while a machine starts. Completed work is not repeated.
tries=$((${{REALM_TRIES:-0}} + 1))
again() {{
  [ "$tries" -ge 5 ] || {{ sleep 30; REALM_TRIES=$tries exec bash "$0"; }}
  printf '{{"done": false, "code": 1, "message": "%s", "time": %s}}' \\
    "code or data could not be fetched: see the journal of google-startup-scripts" \\
    "$(date +%s)" | gcloud storage cp - {outcome} || true
  give_back
}}

mkdir -p "$home"
if [ "$tries" = 1 ]; then
  left=$(({deadline} - $(date +%s)))
  {{ sleep $((left > 0 ? left : 0)); give_back; }} \\
    >> "$home"/deadline.log 2>&1 < /dev/null &
fi
trap again ERR
if [ ! -e "$checkout/.installed" ]; then
  rm -rf "$checkout"
  mkdir -p "$checkout"
  gcloud storage cp {code} "$home"/code.tar.gz
  echo {digest}"  $home/code.tar.gz" | sha256sum --check
  tar --extract --gzip --file="$home"/code.tar.gz --directory="$checkout"
{install}  touch "$checkout/.installed"
fi
{fetch}trap - ERR
cd "$checkout"
export PYTHONPATH="$checkout" PYTHONSAFEPATH=1
code=0
{worker} -- {command} || code=$?
# Who is asked to stop leaves the machine to those who ask.
case $code in 129 | 130 | 143) exit $code ;; esac
# A worker that could not tell its number has nobody else to do it.
[ "$(cat "$home"/number || echo 0)" != 0 ] || give_back
exit $code
"""

# Ubuntu's Python without its venv package has no ensurepip. The environment of a
# checkout has everything that its user's modules may import; the bundle of an
# installation has no such modules, and the trainer's requirements are enough.
INSTALL = """\
  if ! command -v make > /dev/null || ! python3.11 -c "import ensurepip"; then
    apt-get --option=DPkg::Lock::Timeout=600 update
    apt-get --option=DPkg::Lock::Timeout=600 install --yes \\
      make python3.11 python3.11-venv
  fi
  if [ -e "$checkout/Makefile" ]; then
    make --directory="$checkout" env
    "$checkout/.venv/bin/uv" pip install --python "$checkout/.venv/bin/python" \\
      --no-deps --require-hashes --requirement "$checkout/requirements-tpu.lock"
  else
    python3.11 -m venv "$checkout/.venv"
    "$checkout/.venv/bin/python" -m pip install --no-deps --require-hashes \\
      --requirement "$checkout/tpu_launch/requirements.lock"
  fi
"""
"""Shell that makes `$checkout/.venv` from the lock files of the code."""


def startup_script(
    run: Run, role: Role, name: str, deadline: int, home: str = HOME
) -> str:
    """Returns the script that every host of a role's slices runs.

    Args:
      run: the run.
      role: one of its roles.
      name: name of the role's queued resource.
      deadline: time at which the slices are given back, in Unix seconds.
      home: folder of code and logs.
    """
    worker = [
        f"--model_dir={run.model_dir}",
        f"--role={role.name}",
        f"--name={name}",
        f"--slices={role.slices}",
        f"--hosts={role.machines.num_hosts}",
        f"--deadline={deadline}",
        f"--max_restarts={run.config.max_restarts}",
        f"--grace={run.config.grace_seconds}",
    ]
    python = '"$checkout"/.venv/bin/python'
    words = " ".join(word(argument) for argument in role.command)
    return _SCRIPT.format(
        name=name,
        project=run.config.project,
        zone=role.zone,
        home=shlex.quote(home),
        digest=run.code.sha256,
        code=shlex.quote(run.code.url),
        outcome=shlex.quote(f"{run.model_dir.rstrip('/')}/{outcome_name(role.name)}"),
        deadline=deadline,
        install=INSTALL,
        fetch=fetch(run.config.fetch, role.left_out),
        worker=f'{python} -m tpu_launch.worker --log_dir="$home" {shlex.join(worker)}',
        command=f"{python} -m realm_jax.cli.main {words}",
    )


def fetch(folders: Mapping[str, str], left_out: Mapping[str, str]) -> str:
    """Returns shell that copies folders of a bucket to a worker.

    Args:
      folders: gs:// folder -> folder of the worker.
      left_out: gs:// folder -> regular expression, which paths in that folder begin
        with that are not copied.
    """
    return "".join(
        f"mkdir -p {shlex.quote(folder)}\n"
        f"gcloud storage rsync --recursive {_exclude(left_out.get(url, ''))}"
        f"{shlex.quote(url)} {shlex.quote(folder)}\n"
        for url, folder in folders.items()
    )


def word(argument: str) -> str:
    """Returns an argument of a command as a word of shell, run in any folder.

    Gin files at relative paths are those of `$checkout`.
    """
    path = argument.removeprefix(_GIN_FILE)
    if path == argument or path.startswith("/"):
        return shlex.quote(argument)
    return f'{_GIN_FILE}"$checkout"/{shlex.quote(path)}'


def _exclude(pattern: str) -> str:
    if not pattern:
        return ""
    one_pattern = pattern.replace(",", r"\x2c")  # A comma would separate two.
    return f"{shlex.quote(f'--exclude={one_pattern}')} "
