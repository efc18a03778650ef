"""Describes how a training stage uses an index of its corpus."""

import dataclasses

from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import DeviceConfig
from realm_jax.training.refresh import RefreshMode


@dataclasses.dataclass(frozen=True)
class IndexUse:
    """A stage's index: where it is searched, and how often it is rebuilt.

    Attributes:
      searcher: "device" or "scann".
      embed: how the corpus is embedded, at the length of the stage's documents.
      halts: how often training waits while the whole corpus is embedded.
      refresh: how the index follows the retriever; None for an index that is built once
        and searched to the end, outside of the step.
      device: how "device" searches.
    """

    searcher: str
    embed: EmbedConfig
    halts: float = 1.0
    refresh: RefreshMode | None = None
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)

    @property
    def is_in_step(self) -> bool:
        """True if the update itself searches, on the devices."""
        return self.refresh is not None and self.searcher == "device"

    @property
    def has_builder(self) -> bool:
        """True if another job embeds the corpus."""
        return self.refresh is RefreshMode.ASYNC

    @property
    def is_replaced(self) -> bool:
        """True if a new index is loaded while the old one is searched."""
        return self.refresh in (RefreshMode.ASYNC, RefreshMode.BLOCKING)
