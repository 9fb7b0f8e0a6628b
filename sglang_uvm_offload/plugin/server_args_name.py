"""What SGLang's name for the class of its arguments stands for once plugins are loaded.

The class itself cannot take our flags: C code makes its objects (``msgspec``), and no field or keyword can be added to a class
that exists. A subclass in its place, as SGLang's registry would put it, would not be the class of arguments that were made
before: those could not be pickled, nor compared. So the name stands for a class without objects of its own. Called without a
flag, it makes SGLang's own object, the same before and after; called with one, it makes ours. In ``isinstance``, and where
attributes are read or set (by another plugin's hooks), it is SGLang's class.

What remains different: ``type(server_args) is ServerArgs`` is false after plugins are loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, new_class
from typing import Any


def standing_for(plain: Any, ours: Any, fields: Callable[[dict[str, Any]], None], defaults: Mapping[str, Any]) -> Any:
    """A class for the name of ``plain``, which lists the ``fields`` of ``ours`` too. ``defaults``: what each of these flags is
    if it is not given."""
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
    """Have objects of ``plain`` pickled with whatever stands under its name, as they were before it was another class."""
    reduce = plain.__reduce__

    def by_name(self: Any) -> Any:
        rebuild, arguments, *rest = reduce(self)
        return rebuild, tuple(named(plain) if each is plain else each for each in arguments), *rest

    plain.__reduce__ = by_name


def named(plain: Any) -> Any:
    """What stands under the name of ``plain`` in this process."""
    return getattr(sys.modules[plain.__module__], plain.__name__)
