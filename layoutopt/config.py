"""Defaults of the command line's options from TOML files: the user's, and the working folder's over it.

A table is named like a command, a key like an option without its dashes; keys above the tables are for every command
that has such an option. Of several that set the same option the last one counts: the user's file, then the working
folder's; in a file the keys above the tables, then the tables. Words on the command line count most.
"""

from __future__ import annotations

import inspect
import operator
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import typer
from typer.models import OptionInfo

from layoutopt.errors import LayoutOptError

__all__ = ["CONFIG_ENV", "Setting", "default_map", "files", "in_force", "settings"]

CONFIG_ENV = "LAYOUTOPT_CONFIG"
_OWN, _PROJECT = "layoutopt.toml", "pyproject.toml"
_NEVER = frozenset(("help", "version", "config", "install-completion", "show-completion"))


@dataclass(frozen=True)
class Setting:
    """The default of an option.

    Attributes:
        command: words after ``layoutopt``; none for options before the command.
        key: the option, without its dashes.
        value: as the file has it.
        file: where it is set.
        name: of the command's parameter.
    """

    command: tuple[str, ...]
    key: str
    value: Any
    file: Path
    name: str


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        name: of the command's parameter.
        kind: type of a value.
        multiple: it may be given several times.
        least: the smallest value.
        most: the largest.
    """

    name: str
    kind: type
    multiple: bool
    least: float | None
    most: float | None


_WORDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text in quotes"),
    Path: ((str,), "text in quotes"),
}


def files(given: Path | None = None) -> list[tuple[Path, dict[str, Any]]]:
    """The files that are there with what they hold for us, the one that counts most last.

    Args:
        given: in the place of the working folder's; else the environment's LAYOUTOPT_CONFIG.

    Raises:
        LayoutOptError: the one that is given is not there, or one is no TOML.
    """
    from platformdirs import user_config_path

    found = [user_config_path("layoutopt") / "config.toml"]
    named = given or (Path(os.environ[CONFIG_ENV]) if os.environ.get(CONFIG_ENV) else None)
    if named is not None and not named.is_file():
        by = "--config" if given else CONFIG_ENV
        raise LayoutOptError(f"no configuration file {named}, which {by} names: give one that exists")
    found += [named] if named is not None else [Path(_OWN), Path(_PROJECT)]
    out: list[tuple[Path, dict[str, Any]]] = []
    for file in found:
        if not file.is_file() or (file.name == _PROJECT and out and out[-1][0] == Path(_OWN)):
            continue
        content = _read(file, named is not None)
        if content is not None:
            out.append((file, content))
    return out


def _read(file: Path, given: bool) -> dict[str, Any] | None:
    """What a file holds for us; None for a project that holds nothing."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if file.name == _PROJECT and not given:
            return None  # somebody else's, whose tools will say so
        raise LayoutOptError(f"{file} is no TOML ({error}): mend it") from error
    if file.name != _PROJECT:
        return content
    own = content.get("tool", {}).get("layoutopt")
    if own is not None and not isinstance(own, dict):
        raise LayoutOptError(f"{file}: tool.layoutopt is {own!r}, expected a table [tool.layoutopt]")
    return own


def in_force(app: typer.Typer, given: Path | None = None) -> list[Setting]:
    """The settings that count, by command and key.

    Args:
        app: the command line.
        given: as for ``files``.

    Raises:
        LayoutOptError: an unknown table or key, or a value of the wrong type; names the file.
    """
    counting: dict[tuple[tuple[str, ...], str], Setting] = {}
    for file, content in files(given):
        for setting in settings(app, content, file):
            counting[setting.command, setting.key] = setting
    if any(setting.key == "device" for setting in counting.values()):
        from kernels.discovery import DEVICE_ENV

        if os.environ.get(DEVICE_ENV):  # counts more than a file
            counting = {at: s for at, s in counting.items() if at[1] != "device" or at[0] == ("side", "keys")}
    return [counting[at] for at in sorted(counting)]


def settings(app: typer.Typer, content: Mapping[str, Any], file: Path) -> Iterator[Setting]:
    """What a file sets.

    Args:
        app: the command line.
        content: of the file.
        file: for messages.

    Raises:
        LayoutOptError: as ``in_force``.
    """
    commands = dict(_commands(app))
    for key, value in content.items():
        if isinstance(value, dict):
            continue
        having = {at: options[key] for at, options in commands.items() if key in options and not options[key].multiple}
        if not having:
            known = sorted({key for options in commands.values() for key in options})
            raise LayoutOptError(f"{file}, above the tables: {_unknown(key, known, 'no command')}")
        if () in having:  # an option before the command, such as verbose, is meant alone
            having = {(): having[()]}
        for at, option in having.items():
            yield Setting(at, key, _checked(option, value, f"{file}, above the tables", key), file, option.name)
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _table(commands, (key,), value, file)


def _table(commands: Mapping[tuple[str, ...], Any], at: tuple[str, ...], table: dict, file: Path) -> Iterator[Setting]:
    inner = {words[len(at)] for words in commands if words[: len(at)] == at and len(words) > len(at)}
    where = f"{file}, table [{'.'.join(at)}]"
    if at not in commands and not inner:
        known = sorted({".".join(words) for words in commands if words})
        raise LayoutOptError(f"{where}: there is no such command; tables are named {', '.join(known)}")
    for key, value in table.items():
        if key in inner and isinstance(value, dict):
            yield from _table(commands, (*at, key), value, file)
            continue
        options = commands.get(at, {})
        if key not in options:
            known = sorted({*options, *inner})
            raise LayoutOptError(f"{where}: {_unknown(key, known, ' '.join(('layoutopt', *at)))}")
        yield Setting(at, key, _checked(options[key], value, where, key), file, options[key].name)


def _unknown(key: str, known: list[str], what: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key, known, n=1)
    way_out = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
    return f"{what} has {'an' if what.startswith('no ') else 'no'} option {key!r}; {way_out}"


def _commands(app: typer.Typer, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Option]]]:
    """Every command with its options by name."""
    if app.registered_callback is not None:
        yield at, _options(app.registered_callback.callback)
    for info in app.registered_commands:
        assert info.callback is not None
        yield (*at, info.name or info.callback.__name__.replace("_", "-")), _options(info.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance, (*at, str(group.name or group.typer_instance.info.name)))


def _options(function: Any) -> dict[str, Option]:
    """The options of a command, from its annotations."""
    out = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        info = next((x for x in get_args(parameter.annotation)[1:] if isinstance(x, OptionInfo)), None)
        if info is None:
            continue
        words = (info.default, *(info.param_decls or ()))  # in Annotated, the first is where a default would be
        long = next((w[2:].split("/")[0] for w in words if isinstance(w, str) and w.startswith("--")), "")
        kind = get_args(parameter.annotation)[0]
        kind = next((one for one in get_args(kind) if one is not NoneType), kind) if _is_union(kind) else kind
        multiple = get_origin(kind) is list
        if long and long not in _NEVER:
            out[long] = Option(name, get_args(kind)[0] if multiple else kind, multiple, info.min, info.max)
    return out


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _checked(option: Option, value: Any, where: str, key: str) -> Any:
    """A value that its option takes, as the file has it."""
    kinds, words = _WORDS[option.kind]
    items = value if option.multiple and isinstance(value, list) else [value]
    right = all(isinstance(item, kinds) and (bool in kinds or not isinstance(item, bool)) for item in items)
    if not right or (option.multiple and not isinstance(value, list)):
        words = f"a list, each {words}" if option.multiple else words
        raise LayoutOptError(f"{where}: {key} is {value!r}, expected {words}")
    for bound, wrong, side in ((option.least, operator.lt, "least"), (option.most, operator.gt, "most")):
        if bound is not None and any(wrong(item, bound) for item in items):
            raise LayoutOptError(f"{where}: {key} is {value!r}, expected at {side} {bound:g}")
    return value


def default_map(found: list[Setting]) -> dict[str, Any]:
    """Settings as click takes them: by command, then by parameter."""
    out: dict[str, Any] = {}
    for setting in found:
        table = out
        for word in setting.command:
            table = table.setdefault(word, {})
        table[setting.name] = setting.value
    return out
