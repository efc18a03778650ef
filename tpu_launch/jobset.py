"""Describes a run as one JobSet, by which GKE starts, restarts, ends and deletes it.

Trainer and builder are two replicated jobs of `templates/jobset.yaml.jinja`. Exit codes
are the contract:

    code              trainer                           builder
    2                 ends the run                      ends the run
    75                the pod is replaced               the pod is replaced
    129, 130, 143,    all of the run is started again,  the pod is replaced
    disruption        and that does not count
    others            the same, and that counts         the pod is replaced, up to
                      toward max_restarts               max_restarts times each
"""

import functools
import hashlib

from realm_jax.errors import BAD_INPUT, NOT_READY, BadInputError
from realm_jax.hardware import RESERVED
from tpu_launch import templates
from tpu_launch.processes import STOPPED
from tpu_launch.run import Run

VERSION = "0.12"
"""Oldest JobSet that will do: 0.10 reads messages of failed Jobs; until 0.12 a replaced
first pod of a slice kept the others from starting."""
DIGEST = "realm-manifest"
"""Annotation: checksum of all that was asked for. Kueue, say, changes what is there."""


def manifest(run: Run) -> str:
    """Returns the JobSet of a run, in YAML."""
    for role in run.roles:
        if not role.machines.gke:
            raise BadInputError(
                f"expected a slice of v3 to TPU7x for the {role.name} on GKE, got "
                f"{role.machines.accelerator_type}; choose another, or --backend=tpu_vm"
            )
        if role.provisioning == RESERVED and not run.config.reservation:
            raise BadInputError(
                "expected the name of a reservation, which GKE does not look for, got "
                "none; set hardware.LaunchConfig.reservation"
            )
    render = functools.partial(
        templates.render,
        "jobset.yaml.jinja",
        run=run,
        bad_input=BAD_INPUT,
        not_ready=NOT_READY,
        stopped=STOPPED,
    )
    return render(digest=hashlib.sha256(render(digest="").encode()).hexdigest())
