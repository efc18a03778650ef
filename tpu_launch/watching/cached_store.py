"""A folder of a store for who looks at it time and again: one listing a look."""

from typing import Any

from realm_jax.storage import MissingObjectError, ObjectStat, Store

# Logs are larger; whoever follows them keeps what was read.
_LARGEST_BYTES = 1 << 16


class CachedStore:
    """A `Store` that lists one folder when told to, and reads there what has changed.

    What is outside of the folder, or too large to keep, is read each time.
    """

    def __init__(self, store: Store, folder: str):
        """Lists nothing yet; see `look`."""
        self._store, self._folder = store, folder
        self._stats: dict[str, ObjectStat] = {}
        self._kept: dict[str, tuple[ObjectStat, bytes]] = {}

    def look(self) -> None:
        """Lists the folder; until the next time it holds what it held now.

        Raises:
          BadInputError: it cannot be read.
          UnavailableStoreError: it is away.
        """
        self._stats = self._store.stats(self._folder)
        self._kept = {n: kept for n, kept in self._kept.items() if n in self._stats}

    def read(self, name: str) -> bytes:
        """Returns an object; of the folder, one that was there at the last look."""
        if not self._is_within(name):
            return self._store.read(name)
        stat = self._stats.get(name)
        if stat is None:
            raise MissingObjectError(
                f"expected an object at {self.url(name)}, found none"
            )
        kept = self._kept.get(name)
        if kept is not None and kept[0] == stat:
            return kept[1]
        data = self._store.read(name)
        if len(data) <= _LARGEST_BYTES:
            self._kept[name] = (stat, data)
        return data

    def exists(self, name: str) -> bool:
        """See `Store`."""
        return (
            name in self._stats if self._is_within(name) else self._store.exists(name)
        )

    def size(self, name: str) -> int:
        """See `Store`."""
        return self._store.size(name)

    def list(self, folder: str = "") -> list[str]:
        """See `Store`."""
        if not self._is_within(f"{folder}/"):
            return self._store.list(folder)
        return sorted(name for name in self._stats if name.startswith(f"{folder}/"))

    def stats(self, folder: str = "") -> dict[str, ObjectStat]:
        """See `Store`."""
        if not self._is_within(f"{folder}/"):
            return self._store.stats(folder)
        return {n: s for n, s in self._stats.items() if n.startswith(f"{folder}/")}

    def write(self, name: str, data: bytes) -> None:
        """See `Store`; seen at the next look."""
        self._store.write(name, data)

    def create(self, name: str, data: bytes) -> None:
        """See `Store`; seen at the next look."""
        self._store.create(name, data)

    def delete(self, name: str) -> None:
        """See `Store`; seen at the next look."""
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        """See `Store`; seen at the next look."""
        self._store.delete_folder(folder)

    def url(self, name: str = "") -> str:
        """See `Store`."""
        return self._store.url(name)

    def kvstore_spec(self, folder: str) -> dict[str, Any]:
        """See `Store`."""
        return self._store.kvstore_spec(folder)

    def _is_within(self, name: str) -> bool:
        return name.startswith(f"{self._folder}/")
