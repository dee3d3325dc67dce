"""Ctrl-C during the exact search, with real signals; and plans that do not depend on where they are made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from layoutopt import interrupts
from layoutopt.check import check
from layoutopt.solve import Reductions, solve
from tests.problems import block_problem, random_problem

ROOT = Path(__file__).resolve().parent.parent

# A search that takes minutes, in a process of its own; "ready" is printed when the solver is at work.
SEARCH = """
import os, signal, sys, threading, time
from layoutopt import interrupts
from layoutopt.solve import Reductions, solve
from tests.problems import block_problem

def watch():
    while not interrupts._State.searching:
        time.sleep(0.01)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)

def announce(sentence):
    print(sentence)
    if sys.argv[2] == "2":  # the second comes before the search could notice the first
        os.kill(os.getpid(), signal.SIGINT)

problem = block_problem(3, blocks=24, width=6)
threading.Thread(target=watch, daemon=True).start()
code = 0
try:
    with interrupts.graceful(announce):
        found = solve(problem, 3600, reductions=Reductions.none() if sys.argv[1] == "highs" else None)
    print(found.status, found.bound_ns, found.cost_ns)
except KeyboardInterrupt:
    print("ended")
sys.stdout.flush()
os._exit(0)
"""


def _search(what: str, times: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, what, str(times)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", ["highs", "tables"])
def test_ctrl_c_returns_the_best_assignment_with_its_honest_gap(what: str) -> None:
    said, result = _search(what, 1)
    assert "best plan so far" in said
    status, bound, cost = result.split()
    assert status == "FEASIBLE"
    assert 0 < int(bound) < int(cost)


def test_a_second_ctrl_c_ends_the_search() -> None:
    assert _search("highs", 2)[-1] == "ended"


def test_ctrl_c_outside_a_search_is_what_it_always_is() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts.graceful(print):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert not interrupts.requested()


def test_what_foreign_code_returns_and_raises_comes_through() -> None:
    with interrupts.graceful(print):
        assert interrupts.interruptible(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            interrupts.interruptible(lambda: 1 // 0)
    assert not interrupts.abandoned()


def test_a_search_inside_graceful_finds_the_same() -> None:
    problem = random_problem(5, ops=6)
    alone = solve(problem, reductions=Reductions.none())
    with interrupts.graceful(print):
        inside = solve(problem, reductions=Reductions.none())
    assert (inside.cost_ns, inside.primary, inside.choice) == (alone.cost_ns, alone.primary, alone.choice)


def test_no_time_at_all_still_returns_an_assignment_with_its_bound() -> None:
    problem = block_problem(3, blocks=6, width=6)
    found = solve(problem, 1e-6)
    check(problem, found)
    assert found.status in ("FEASIBLE", "OPTIMAL")
    assert 0 < found.bound_ns <= found.cost_ns
    assert found.status == "OPTIMAL" or found.bound_ns < found.cost_ns


def test_plans_are_the_same_in_any_process(tmp_path: Path) -> None:
    plans = []
    for seed, threads in (("0", "1"), ("4711", "2")):
        env = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        made = []
        for graph, device in (("vit-digits", "adreno-740"), ("vit-digits", "mali-g78")):
            target = tmp_path / f"{graph}-{device}-{seed}.json"
            command = [sys.executable, "-m", "layoutopt", "plan", graph, "--device-model", device, "-o", str(target)]
            subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=300)
            content = json.loads(target.read_bytes())
            assert content["solver"].pop("seconds") > 0
            assert content["solver"]["status"] == "OPTIMAL"
            made.append(json.dumps(content))
        plans.append(made)
    assert plans[0] == plans[1]
