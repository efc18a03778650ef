"""The fixtures of what is registered with SeqIO."""

from tests.seqio_fixtures import registry, store, towns

__all__ = ["registry", "store", "towns"]
