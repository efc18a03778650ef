"""Opens the engine of a run by what its model directory says of the launch."""

from typing import TYPE_CHECKING

from realm_jax.extras import require_extra
from tpu_launch.records import GKE, TPU_VM, LaunchRecord
from tpu_launch.run import Engine

if TYPE_CHECKING:
    from tpu_launch.gke import Gke

BACKENDS = (GKE, TPU_VM)


def of_record(record: LaunchRecord) -> Engine | None:
    """Returns the engine that runs what was launched; None for this machine."""
    if record.backend == GKE:
        return open_gke(record)
    if record.backend != TPU_VM:
        return None
    require_extra("launch", f"--backend={TPU_VM}")
    from tpu_launch.tpu_vm import TpuVm

    return TpuVm(record.where["project"], record.where["zones"], record.deadline or 0.0)


def open_gke(record: LaunchRecord) -> "Gke":
    """Returns the cluster that runs what was launched."""
    require_extra("launch", f"--backend={GKE}")
    from tpu_launch.gke import Gke

    return Gke(record.where["namespace"])
