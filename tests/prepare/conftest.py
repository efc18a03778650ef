"""The fixtures of what is registered with SeqIO."""

from tests.data.conftest import small_store
from tests.seqio_fixtures import registry, store, towns

__all__ = ["registry", "small_store", "store", "towns"]
