"""Of msgspec what calibrating and writing a device model need: structs as dataclasses, conversion, JSON text."""

from __future__ import annotations

import builtins
import dataclasses
import json as _json
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

__all__ = ["DecodeError", "Struct", "ValidationError", "convert", "json", "to_builtins"]


class DecodeError(ValueError):
    """What msgspec raises on text that is damaged."""


class ValidationError(DecodeError):
    """What msgspec raises on values of another type."""


class Struct:
    """A dataclass; ``frozen`` as in msgspec."""

    def __init_subclass__(cls, frozen: bool = False) -> None:
        dataclasses.dataclass(frozen=frozen)(cls)


def to_builtins(value: Any) -> Any:
    """Dictionaries, lists, numbers and text."""
    if isinstance(value, Mapping):
        return {key: to_builtins(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_builtins(item) for item in value]
    return value


def convert(value: Any, type: Any) -> Any:
    """Plain values as ``type``: dataclasses, mappings, tuples of one kind, numbers, text, and unions of those.

    Raises:
        ValidationError: the value is none of that type.
    """
    origin, arguments = get_origin(type), get_args(type)
    if type is Any:
        return value
    if origin in (Union, types.UnionType):
        return _as_one_of(value, arguments)
    if isinstance(type, builtins.type) and dataclasses.is_dataclass(type) and isinstance(value, Mapping):
        hints = get_type_hints(type)
        known = [f.name for f in dataclasses.fields(type) if f.name in value]
        return type(**{name: convert(value[name], hints[name]) for name in known})
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: convert(item, arguments[1]) for key, item in value.items()}
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(convert(item, arguments[0]) for item in value)
    if type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type is None or type is types.NoneType:
        matches = value is None
    else:
        matches = isinstance(value, origin or type) and isinstance(value, bool) == (type is bool)
    if not matches:
        raise ValidationError(f"expected {type}, got {value!r}")
    return value


def _as_one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        try:
            return convert(value, choice)
        except ValidationError:
            continue
    raise ValidationError(f"expected one of {choices}, got {value!r}")


class json:
    """``msgspec.json``."""

    @staticmethod
    def encode(value: Any, order: str | None = None) -> bytes:
        """JSON without spaces; ``order`` "sorted" sorts keys."""
        plain = to_builtins(value)
        return _json.dumps(plain, ensure_ascii=False, separators=(",", ":"), sort_keys=order == "sorted").encode()
