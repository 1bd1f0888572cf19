"""Options declared once: a field says its type and what its value must be; its line of help stands in the docstring.

::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Shelf(Options):
        '''A shelf.

Attributes:
            width: places in a row.
        '''

        width: Annotated[int, INT_FROM_1] = 8
        is_open: bool = True

``Shelf(width=0)`` and ``made(Shelf, {"width": 0})`` raise a ``ConfigError`` that names the option, its value and what would
work; so do names that do not exist, are missing, or belong to other systems. Where a field holds options itself, an object
with these may be given in their place. ``declared`` lists the fields, for tables in the documentation.
"""

from __future__ import annotations

import os
import types
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache, partial
from inspect import Signature, get_annotations, signature
from typing import Annotated, Any, ClassVar, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cargohold.errors import ConfigError, option_path
from cargohold.option_values import (
    MAX_TIMEOUT_S,
    find_factory,
    is_int,
    is_number,
    is_positive_int,
    is_positive_number,
    is_timeout,
    parse_room,
)

T = TypeVar("T")
Reader = Callable[[str, Any], Any]
"""Given an option's name and value, returns the value to keep. Raises ``ConfigError`` if it cannot be kept."""


def must(fits: Callable[[Any], bool], expected: str) -> Reader:
    """Return the reader of a value for which ``fits`` holds. ``expected`` ends the sentence "it must be ..."."""

    def read(key: str, value: Any) -> Any:
        if not fits(value):
            raise ConfigError(key, value, f"it must be {expected}")
        return value

    return read


def require(options: object, key: str, holds: bool, expected: str) -> None:
    """Refuse the value of an option unless ``holds``, as of one that depends on others. ``expected``: see ``must``."""
    if not holds:
        raise ConfigError(key, getattr(options, key), f"it must be {expected}")


def one_of(*choices: str) -> Reader:
    return must(lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}")


def checked(check: Reader) -> Reader:
    """Return the reader of a value that ``check`` does not refuse. The value is kept as it was written."""

    def read(key: str, value: Any) -> Any:
        check(key, value)
        return value

    return read


def list_of(read_item: Reader) -> Reader:
    def read(key: str, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ConfigError(key, value, "it must be a list")
        return tuple(read_item(f"{key}[{at}]", item) for at, item in enumerate(value))

    return read


SIZE: Final = checked(parse_room)
FACTORY: Final = checked(find_factory)
INT_FROM_0: Final = must(lambda value: is_int(value) and value >= 0, "an integer from 0")
INT_FROM_1: Final = must(is_positive_int, "an integer from 1")
SECONDS: Final = must(is_positive_number, "a number of seconds above 0")
SHORT_TIME: Final = must(is_timeout, f"a number of seconds above 0, at most {MAX_TIMEOUT_S}")
FRACTION: Final = must(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
PART: Final = must(lambda value: is_positive_number(value) and value <= 1, "a number above 0 and at most 1")


class OptionsType(ABCMeta):
    """Checks options before an object of them is made: a dataclass would keep any value, and raise a bare ``TypeError``."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """Make an object of the class. Raises ``ConfigError`` for an option that is unknown, missing or impossible."""
        return super().__call__(*args, **_read(cls, given))

    @property
    def __signature__(cls) -> Signature:
        """What people and tools are shown: the options, which ``__call__`` would hide."""
        hints = get_type_hints(cls)
        shown = signature(cls.__dict__["__init__"])
        own = [each.replace(annotation=hints[each.name]) for each in shown.parameters.values() if each.name in hints]
        return shown.replace(parameters=own)


class Options(metaclass=OptionsType):
    """Base of dataclasses of options.

    Attributes:
        names_elsewhere: what the options are called in other systems, in small letters, and what to write here instead:
            ``here that is ...``.
    """

    __slots__ = ()
    names_elsewhere: ClassVar[Mapping[str, str]] = types.MappingProxyType({})


def made(kind: type[T], given: Mapping[str, Any], path: str = "", *, beside: Collection[str] = ()) -> T:
    """Make options from a mapping, such as an object in JSON.

    Args:
        kind: their class, which may be any dataclass.
        given: the options by name.
        path: prefix of the names in errors, such as ``connectors[1].``.
        beside: names of other options that may stand next to these, for suggestions in errors.

    Raises:
        ConfigError: an option is unknown, missing, or its value impossible.
    """
    with option_path(path):
        return kind(**_read(kind, given, beside))


@dataclass(frozen=True, slots=True)
class Declared:
    """An option as its class declares it.

    Attributes:
        read: checks a value.
        default: its default; ``MISSING`` if it must be given.
        owner: the class that declares it, in whose docstring its line of help is.
    """

    read: Reader
    default: Any
    owner: type


@cache
def declared(kind: type) -> Mapping[str, Declared]:
    """Return the options of a class by name."""
    hints = _hints(kind)
    found = {}
    for field in fields(kind):
        if field.init:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            owner = next(base for base in kind.__mro__ if field.name in get_annotations(base))
            found[field.name] = Declared(_reader(hints[field.name]), default, owner)
    return found


def options_of(what: type, key: str, value: Any) -> Any:
    """Read options: an object of their class, or a mapping of which one is made."""
    if isinstance(value, what):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, f"it must be an object with options, or a {what.__name__}")
    return made(what, value, f"{key}.")


def refuse_names_elsewhere(given: Iterable[str], names: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for options under names that they have elsewhere; it tells the names of all of them here."""
    meant = {key: names[name] for key in given if (name := _plain_name(key)) in names}
    if not meant:
        return
    (key, name), *others = meant.items()
    besides = "".join(f"; {other} is {its_name}" for other, its_name in others)
    # Objects may hold keys of a store.
    shown = values[key] if isinstance(values[key], str | int | float | None) else "(not shown)"
    raise ConfigError(key, shown, f"here that is {name}{besides}")


def no_such_option(key: object, value: object, known: Collection[str], of: str = "") -> ConfigError:
    """Return the refusal of an option that does not exist, with those that may be meant."""
    close = get_close_matches(str(key), known, n=2)
    meant = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(known))}"
    return ConfigError(str(key), value, f"there is no such option{of}; {meant}")


def _plain_name(key: object) -> str:
    """Return a name as tables have it: environment variables and LMCache's file prefix it."""
    return str(key).lower().removeprefix("lmcache.").removeprefix("lmcache_").removeprefix("dyn_kvbm_")


def _read(kind: type, given: Mapping[str, Any], beside: Collection[str] = ()) -> dict[str, Any]:
    known = declared(kind)
    refuse_names_elsewhere([key for key in given if key not in known], getattr(kind, "names_elsewhere", {}), given)
    for key, value in given.items():
        if key not in known:
            raise no_such_option(key, value, [*known, *beside])
    for name, option in known.items():
        if option.default is MISSING and name not in given:
            raise ConfigError(name, None, "it must be given")
    return {name: known[name].read(name, value) for name, value in given.items()}


def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:  # a third-party class may name types that only type checkers import
        return {**_hints(kind.__mro__[1]), **dict.fromkeys(kind.__annotations__, Any)}


def _reader(hint: Any) -> Reader:
    """Return what reads values of an annotated type, or of a plain one."""
    if get_origin(hint) is Annotated:
        plain, read = get_args(hint)[:2]
        return _or_none(read) if type(None) in get_args(plain) else cast("Reader", read)
    if isinstance(hint, OptionsType):
        return partial(options_of, hint)
    if get_origin(hint) is Sequence and isinstance(get_args(hint)[0], OptionsType):
        return list_of(partial(options_of, get_args(hint)[0]))
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = tuple(get_origin(alternative) or alternative for alternative in alternatives)
    if not _NAMES.keys() >= set(kinds):
        return lambda _, value: value  # a third-party type, which has to check that itself
    names = " or ".join(dict.fromkeys(name for kind in kinds if (name := _NAMES[kind])))
    return must(lambda value: _is_one_of(value, kinds), names)


def _or_none(read: Reader) -> Reader:
    return lambda key, value: None if value is None else read(key, value)


_NAMES: Final[Mapping[Any, str]] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "nothing",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    dict: "an object",
    Mapping: "an object",
    os.PathLike: "",  # beside str; JSON has no such values
}
"""Types that are checked, and what messages call them."""


def _is_one_of(value: object, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, str):
        return str in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
