"""Builds the startup script of a worker: unpacks the bundle, runs the supervisor.

Cloud TPU runs it as root on every host of a slice, at every boot. Completed work
remains after a reboot, so the script only does what is missing. `local` runs the same
script, with another `Site`.
"""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType

_GIN_FILE = "--gin_file="

_SCRIPT = """\
#!/bin/bash
# {name}
set -euo pipefail
{prologue}home={home}
checkout="$home"/{digest}
if [ ! -e "$checkout/.installed" ]; then
  rm -rf "$checkout"
  mkdir -p "$checkout"
  {copy} {url} "$home"/bundle.tar.gz
  echo {digest}"  $home/bundle.tar.gz" | sha256sum --check
  tar --extract --gzip --file="$home"/bundle.tar.gz --directory="$checkout"
{install}  touch "$checkout/.installed"
fi
{fetch}cd {directory}
export PYTHONPATH="$checkout${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1
exec {supervisor} -- {command}
"""

# The lists of apt, registries and the metadata server that provides credentials are
# locked or unavailable at times, mostly while a machine starts. Completed work is not
# repeated.
_PROLOGUE = """\
export HOME=/root DEBIAN_FRONTEND=noninteractive PATH="$PATH:/snap/bin"
tries=$((${REALM_TRIES:-0} + 1))
trap '[ "$tries" -ge 5 ] || { sleep 30; REALM_TRIES=$tries exec bash "$0"; }' ERR
"""

# Ubuntu's Python without its venv package has no ensurepip. The environment of a
# checkout has everything that its user's modules may import; the bundle of an
# installation has no such modules, and the trainer's requirements are enough.
_INSTALL = """\
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
      --requirement "$checkout/tpu_launch/worker/requirements.lock"
  fi
"""


@dataclasses.dataclass(frozen=True)
class Site:
    """The environment of the script on a machine. All values are pieces of shell.

    Attributes:
      home: folder of bundle, checkout and logs.
      python: interpreter that runs the bundle, once `install` is done.
      directory: working directory of the command.
      copy: command that copies the URL of an object to a file.
      sync: command that copies the URL of a folder to a folder, where it differs.
      prologue: lines before all others.
      install: lines that create `python`.
      flags: further flags of the supervisor.
    """

    home: str
    python: str
    directory: str
    copy: str
    sync: str = ""
    prologue: str = ""
    install: str = ""
    flags: Sequence[str] = ()


TPU_VM = Site(
    home="/opt/realm",
    python='"$checkout"/.venv/bin/python',
    directory='"$checkout"',
    copy="gcloud storage cp",
    sync="gcloud storage rsync --recursive",
    prologue=_PROLOGUE,
    install=_INSTALL,
)


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
    left_out: Mapping[str, str] = MappingProxyType({}),
    command: Sequence[str],
    site: Site = TPU_VM,
) -> str:
    """Returns the script that every host of an attempt runs.

    Args:
      name: name of the slices, shown in a comment.
      run: id of the run.
      role: "trainer" or "builder".
      attempt: number of the attempt.
      slices: number of slices that work together.
      hosts: number of hosts of each slice.
      model_dir: destination of state, logs and the done marker.
      bundle_url: URL of the bundle.
      bundle_digest: sha256 of the bundle.
      deadline: time at which the supervisor ends, in Unix seconds.
      fetch: gs:// folder -> folder of the worker.
      left_out: gs:// folder -> regular expression, which paths in that folder begin
        with that are not copied.
      command: arguments of `realm`. Gin files at relative paths are those of the
        bundle.
      site: environment of the machine.
    """
    supervisor = [
        f"--model_dir={model_dir}",
        f"--run={run}",
        f"--role={role}",
        f"--attempt={attempt}",
        f"--slices={slices}",
        f"--hosts={hosts}",
        f"--deadline={deadline}",
        *site.flags,
    ]
    copies = [
        f"mkdir -p {shlex.quote(folder)}\n"
        f"{site.sync} {_exclude(left_out.get(url, ''))}"
        f"{shlex.quote(url)} {shlex.quote(folder)}\n"
        for url, folder in fetch.items()
    ]
    words = " ".join(_word(argument) for argument in command)
    return _SCRIPT.format(
        name=name,
        prologue=site.prologue,
        home=site.home,
        digest=bundle_digest,
        copy=site.copy,
        url=shlex.quote(bundle_url),
        install=site.install,
        fetch="".join(copies),
        directory=site.directory,
        supervisor=f"{site.python} -m tpu_launch.worker.supervisor "
        f'--log_dir="$home" {shlex.join(supervisor)}',
        command=f"{site.python} -m realm_jax.cli.main {words}",
    )


def _exclude(pattern: str) -> str:
    if not pattern:
        return ""
    one_pattern = pattern.replace(",", r"\x2c")  # A comma would separate two.
    return f"{shlex.quote(f'--exclude={one_pattern}')} "


def _word(argument: str) -> str:
    path = argument.removeprefix(_GIN_FILE)
    if path == argument or path.startswith("/"):
        return shlex.quote(argument)
    return f'{_GIN_FILE}"$checkout"/{shlex.quote(path)}'
