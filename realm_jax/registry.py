"""Names of what modules of one's own define, such as encoders and objectives."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from realm_jax.errors import BadInputError

T = TypeVar("T")
Registered = TypeVar("Registered")


class Registry(Generic[T]):
    """Names of things of one kind; whoever looks one up has imported its module."""

    def __init__(self, kind: str, built_in: Mapping[str, T] | None = None):
        """`kind` is a noun for messages, such as "encoder"."""
        self._kind = kind
        self._things = dict(built_in or {})

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Returns a decorator that registers a class or function of a module.

        The same one may be registered again, as a module that is reloaded does.
        """

        def register(thing: Any) -> Any:
            place, taken = _place(thing), _place(self._things.get(name, thing))
            if place != taken:
                raise BadInputError(
                    f"expected a new name for the {self._kind} {place}, got {name!r}, "
                    f"which is that of {taken}; choose another"
                )
            self._things[name] = thing
            return thing

        return register

    def get(self, name: Any) -> T:
        """Returns what has a name, which may come from a gin file or a record."""
        if not isinstance(name, str) or name not in self._things:
            known = f" ({', '.join(sorted(self._things))})" if self._things else ""
            raise BadInputError(
                f"expected an {self._kind} that is registered{known}, got {name!r}; "
                "import the module that defines it first (--import_module=MODULE of a "
                "command)"
            )
        return self._things[name]

    def name_of(self, thing: Any) -> str | None:
        """Returns the name of what was registered; None if it was not."""
        return next((name for name, one in self._things.items() if one is thing), None)


def _place(thing: Any) -> str:
    name = getattr(thing, "__qualname__", "<instance>")
    # Two that a function returns, or two lambdas, have the same name.
    unique = f" {id(thing):#x}" if "<" in name else ""
    return f"{thing.__module__}.{name}{unique}"
