"""Describes a run as one JobSet, by which GKE starts, restarts, ends and deletes it.

https://jobset.sigs.k8s.io, version `JOBSET_VERSION` or later. Trainer and builder are
two replicated jobs, of which each Job is a slice and each pod a host. Exit codes are
the contract:

    code              trainer                           builder
    2                 ends the run                      ends the run
    75                the pod is replaced               the pod is replaced
    129, 130, 143,    all of the run is started again,  the pod is replaced
    disruption        and that does not count
    others            the same, and that counts         the pod is replaced, up to
                      toward max_restarts               max_restarts times each

The code of a run is always that of its archive; an image that was built for this
package has the libraries.
"""

import functools
import hashlib
import json
import pathlib
import re
import textwrap
from typing import Any

import jinja2

from realm_jax.errors import BAD_INPUT, NOT_READY, BadInputError
from realm_jax.hardware import RESERVED
from tpu_launch.processes import STOPPED
from tpu_launch.run import Role, Run
from tpu_launch.startup import INSTALL, fetch

JOBSET_VERSION = "0.12"
"""0.10 reads messages of failed Jobs; until 0.12 a replaced first pod of a slice kept
the others from starting."""
DIGEST = "realm-manifest"
"""Annotation: checksum of all that was asked for. Kueue, say, changes what is there."""

_TEMPLATE = pathlib.Path(__file__).with_name("jobset.yaml.jinja")

# The server of credentials of a new pod answers after some seconds.
_FETCH = """\
set -euo pipefail
again() {{ for pause in 5 20 60; do "$@" && return; sleep "$pause"; done; "$@"; }}
again gcloud storage cp {code.url} /realm/code.tar.gz
echo "{code.sha256}  /realm/code.tar.gz" | sha256sum --check
mkdir -p /realm/code
tar --extract --gzip --file=/realm/code.tar.gz --directory=/realm/code
{folders}"""

_INSTALL = f"""\
set -euo pipefail
if command -v realm; then exit; fi
checkout=/realm/code
{textwrap.dedent(INSTALL)}"""

# The shell becomes the command, so that SIGTERM reaches it.
_RUN = """\
ulimit -l 68719476736
export PATH="/realm/code/.venv/bin:$PATH"
exec python -m realm_jax.cli.main "$@"
"""


def manifest(run: Run) -> str:
    """Returns the JobSet of a run, in YAML.

    Raises:
      BadInputError: GKE has no such machines, or the reservation has no name.
    """
    for role in run.roles:
        _require_known(run, role)

    def fetch_script(role: Role) -> str:
        folders = fetch(run.config.fetch, role.left_out)
        return _FETCH.format(code=run.code, folders=folders)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["literal"] = _literal
    environment.filters["json"] = functools.partial(json.dumps, ensure_ascii=False)
    template = environment.from_string(_TEMPLATE.read_text())
    values: dict[str, Any] = {
        "run": run,
        "config": run.config,
        "deadline": int(3600 * run.config.deadline_hours),
        "ttl": int(3600 * run.config.ttl_hours),
        "bad_input": BAD_INPUT,
        "not_ready": NOT_READY,
        "stopped": [*STOPPED],
        "fetch_script": fetch_script,
        "install_script": _INSTALL,
        "run_script": _RUN,
    }
    digest = hashlib.sha256(template.render(values, digest="").encode()).hexdigest()
    return template.render(values, digest=digest)


def _require_known(run: Run, role: Role) -> None:
    if role.machines.gke is None:
        raise BadInputError(
            f"expected a slice of v3 to TPU7x for the {role.name} on GKE, got "
            f"{role.machines.accelerator_type}; choose another, or --backend=tpu_vm"
        )
    if role.provisioning == RESERVED and not run.config.reservation:
        raise BadInputError(
            "expected the name of a reservation, which GKE does not look for, got "
            "none; set hardware.LaunchConfig.reservation"
        )


def _literal(text: str) -> str:
    """Returns what Kubernetes, which expands $(NAME) and halves $$, reads as `text`."""
    return re.sub(r"\$(?=[$(])", "$$", text)
