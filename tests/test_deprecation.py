"""Old names warn, work, and go when they were said to go."""

from __future__ import annotations

import inspect

import pytest

import layoutopt
from layoutopt.deprecation import MOVED, Deprecation, renamed_arguments


@renamed_arguments("0.2", "0.4", budget="memory")
def plan(graph: str, memory: str = "") -> tuple[str, str]:
    return graph, memory


def test_an_old_argument_works_and_warns_where_it_was_written() -> None:
    sentence = r"plan\(budget=\) is deprecated since layoutopt 0.2 and goes in 0.4: use memory="
    with pytest.warns(DeprecationWarning, match=sentence) as caught:
        assert plan("g", budget="1GiB") == ("g", "1GiB")  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    assert plan("g", memory="2GiB") == ("g", "2GiB")
    assert list(inspect.signature(plan).parameters) == ["graph", "memory"]
    with pytest.raises(TypeError, match="both 'budget' and 'memory'"):
        plan("g", memory="1GiB", budget="1GiB")  # type: ignore[call-arg]


def test_an_old_name_of_the_package_works_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Deprecation("layoutopt.make_layout", "layoutopt.layout:Layout", "0.2", "0.4")
    monkeypatch.setitem(MOVED, "make_layout", old)
    with pytest.warns(DeprecationWarning, match=r"use layoutopt\.layout\.Layout") as caught:
        assert layoutopt.make_layout is layoutopt.Layout
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError):
        layoutopt.make_layouts  # noqa: B018


def test_what_is_overdue_is_gone() -> None:
    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    now = number(layoutopt.__version__)
    overdue = [str(d) for d in MOVED.values() if number(d.until) <= now]
    assert overdue == []
    assert all(number(d.until) >= (number(d.since)[0], number(d.since)[1] + 2) for d in MOVED.values())
