"""Builds the startup script of a TPU VM: installs the code, runs the worker.

Cloud TPU runs it as root on every host of a slice, at every boot. Completed work
remains after a reboot, so the script only does what is missing. It gives the slices
back when their work has ended and at the deadline, so that nobody need be there.
"""

from tpu_launch import templates
from tpu_launch.records import outcome_name
from tpu_launch.run import Role, Run

HOME = "/opt/realm"
"""Folder of code and logs on a TPU VM."""


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
    worker = {
        "model_dir": run.model_dir,
        "role": role.name,
        "name": name,
        "slices": role.slices,
        "hosts": role.machines.num_hosts,
        "deadline": deadline,
        "max_restarts": run.config.max_restarts,
        "grace": run.config.grace_seconds,
    }
    return templates.render(
        "startup.sh.jinja",
        run=run,
        role=role,
        name=name,
        deadline=deadline,
        home=home,
        outcome=f"{run.model_dir.rstrip('/')}/{outcome_name(role.name)}",
        worker=[f"--{flag}={value}" for flag, value in worker.items()],
    )
