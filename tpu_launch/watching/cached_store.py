"""Caches a folder of a store that is polled, with one listing per poll."""

from typing import Any

from realm_jax.storage import MissingObjectError, ObjectStat, Store

# Logs are larger, and their readers keep what they have read.
_LARGEST_BYTES = 1 << 16


class CachedStore:
    """A `Store` that lists one folder on request, and rereads only changed objects.

    Objects outside the folder, or too large to cache, are read every time.
    """

    def __init__(self, store: Store, folder: str):
        """Wraps a store; the folder appears empty until `look` is called."""
        self._store, self._folder = store, folder
        self._stats: dict[str, ObjectStat] = {}
        self._kept: dict[str, tuple[ObjectStat, bytes]] = {}

    def look(self) -> None:
        """Lists the folder; its content is fixed until the next call.

        Raises:
          BadInputError: the folder cannot be read.
          UnavailableStoreError: the store does not answer.
        """
        self._stats = self._store.stats(self._folder)
        self._kept = {n: kept for n, kept in self._kept.items() if n in self._stats}

    def read(self, name: str) -> bytes:
        """Returns an object's contents; in the folder, only those of the last listing.

        Raises:
          MissingObjectError: there is none, or it was not listed.
        """
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
        """See `Store`; visible after the next `look`."""
        self._store.write(name, data)

    def create(self, name: str, data: bytes) -> None:
        """See `Store`; visible after the next `look`."""
        self._store.create(name, data)

    def sync(self, folder: str) -> None:
        """See `Store`."""
        self._store.sync(folder)

    def delete(self, name: str) -> None:
        """See `Store`; visible after the next `look`."""
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        """See `Store`; visible after the next `look`."""
        self._store.delete_folder(folder)

    def url(self, name: str = "") -> str:
        """See `Store`."""
        return self._store.url(name)

    def kvstore_spec(self, folder: str) -> dict[str, Any]:
        """See `Store`."""
        return self._store.kvstore_spec(folder)

    def _is_within(self, name: str) -> bool:
        return name.startswith(f"{self._folder}/")
