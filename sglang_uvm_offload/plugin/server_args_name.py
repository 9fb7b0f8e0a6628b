"""The proxy class that replaces SGLang's name ``ServerArgs`` once plugins are loaded.

``ServerArgs`` itself cannot take our flags: its objects are created by C code (``msgspec``), and an existing class accepts no
new fields or keywords. A subclass in its place, as SGLang's registry would install, would differ from the class of arguments
created earlier, which could then be neither pickled nor compared. So the name becomes a proxy without instances of its own:

- Called without our flags, it creates SGLang's own object, before and after plugins load.
- Called with one, it creates ours.
- In ``isinstance`` and for attribute access (by another plugin's hooks), it is SGLang's class.

One difference remains: ``type(server_args) is ServerArgs`` is false after plugins are loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, new_class
from typing import Any


def standing_for(plain: Any, ours: Any, fields: Callable[[dict[str, Any]], None], defaults: Mapping[str, Any]) -> Any:
    """A proxy for the name of ``plain`` that also lists the ``fields`` of ``ours``. ``defaults`` maps each of our flags to its
    default."""
    name: Any = None

    class Name(type(plain)):  # type: ignore[misc]  # a metaclass of C code
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not name:  # a subclass of it
                return super().__call__(*args, **kwargs)
            if any(_differs(kwargs[flag], default) for flag, default in defaults.items() if flag in kwargs):
                return ours(*args, **kwargs)
            return plain(*args, **{key: value for key, value in kwargs.items() if key not in defaults})

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain) if cls is name else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: Any) -> bool:
            return issubclass(subclass, plain) if cls is name else super().__subclasscheck__(subclass)

        def __setattr__(cls, attribute: str, value: Any) -> None:
            if cls is name:
                setattr(plain, attribute, value)
            else:
                super().__setattr__(attribute, value)

        def __delattr__(cls, attribute: str) -> None:
            if cls is name:
                delattr(plain, attribute)
            else:
                super().__delattr__(attribute)

        @property
        def __dict__(cls) -> Mapping[str, Any]:  # type: ignore[override]
            own: Mapping[str, Any] = type.__dict__["__dict__"].__get__(cls)
            return MappingProxyType({**vars(plain), **own}) if cls is name else own

    def body(namespace: dict[str, Any]) -> None:
        fields(namespace)
        namespace.update(__module__=plain.__module__, __qualname__=plain.__qualname__, __doc__=plain.__doc__)

    name = new_class(plain.__name__, (plain,), {"dict": True, "metaclass": Name}, body)
    return name


def _differs(value: Any, default: Any) -> bool:
    return type(value) is not type(default) or bool(value != default)


def pickle_by_name(plain: Any) -> None:
    """Pickle objects of ``plain`` under its name, whatever the name is bound to, as before it was replaced."""
    reduce = plain.__reduce__

    def by_name(self: Any) -> Any:
        rebuild, arguments, *rest = reduce(self)
        return rebuild, tuple(named(plain) if each is plain else each for each in arguments), *rest

    plain.__reduce__ = by_name


def named(plain: Any) -> Any:
    """The object that the name of ``plain`` is bound to in this process."""
    return getattr(sys.modules[plain.__module__], plain.__name__)
