"""Opens the engine of a run by what its model directory says of the launch."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.extras import require_extra
from realm_jax.hardware import LaunchConfig
from realm_jax.storage import Store, open_store
from tpu_launch import records
from tpu_launch.log_files import stored_lines
from tpu_launch.records import GKE, LOCAL, TPU_VM, LaunchRecord
from tpu_launch.run import Engine, Run

BACKENDS = (GKE, TPU_VM)


def of_run(backend: str, run: Run, deadline: float) -> Engine:
    """Returns the engine that is to run a run.

    Args:
      backend: "gke" or "tpu_vm".
      run: the run.
      deadline: time at which everything is given back, in Unix seconds.

    Raises:
      BadInputError: settings of the engine are missing, or its client is not installed.
    """
    if backend == TPU_VM:
        run.config.require_zone()
        for role in run.roles:
            if not role.machines.runtime:
                raise BadInputError(
                    f"expected a slice that Cloud TPU serves for the {role.name}, got "
                    f"{role.machines.accelerator_type}; choose another, or "
                    f"--backend={GKE}"
                )
    return _open(backend, where(backend, run), deadline)


def of_record(record: LaunchRecord, store: Store) -> Engine | None:
    """Returns the engine that runs what was launched; None for this machine.

    Raises:
      BadInputError: its client is not installed.
    """
    if record.backend == LOCAL:
        return None
    return _open(record.backend, record.where, record.deadline or 0.0, store)


def where(backend: str, run: Run) -> dict[str, Any]:
    """Returns what it takes to find a run again, as in `LaunchRecord`."""
    config: LaunchConfig = run.config
    if backend == GKE:
        return {"namespace": config.namespace}
    zones = sorted({role.zone for role in run.roles})
    return {"project": config.project, "zones": zones}


def lines(
    record: LaunchRecord,
    store: Store,
    role: str | None,
    worker: int | None,
    follow: bool,
    stop: threading.Event,
) -> Iterator[tuple[str, str]]:
    """Yields lines of the workers of what was launched, as `Engine.logs`."""
    engine = of_record(record, store)
    if engine is not None:
        return engine.logs(record.id, role, worker, follow, stop)
    return stored_lines(
        *(open_store(record.where["logs"]), "", role, worker, follow, stop),
        is_over=lambda: records.has_ended(store),
    )


def _open(
    backend: str,
    place: Mapping[str, Any],
    deadline: float,
    store: Store | None = None,
) -> Engine:
    require_extra("launch", f"--backend={backend}")
    if backend == GKE:
        from tpu_launch.gke import Gke

        return Gke(place["namespace"])
    from tpu_launch.tpu_vm import TpuVm

    return TpuVm(place["project"], place["zones"], deadline, store)
