"""A calibration's time and repetitions, on a simulated device with a clock of its own: nothing here waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from test_costmodel_calibrate import small_graph

from costmodel import device
from costmodel.budget import Budget, budget_seconds
from costmodel.calibrate import Calibration, describe_timing
from costmodel.features import FEATURES
from costmodel.journal import Journal
from costmodel.model import CostModel
from costmodel.pool import Pool, pool_of
from costmodel.rounds import LEAST_ROUNDS
from costmodel.runner import Prepared
from costmodel.session import MOST_ROUNDS, SEGMENT, Session
from kernels.spec import DeviceLimits, Kernel
from layoutopt.errors import DeviceError

MODEL = replace(device.load("generic-cpu"), features=FEATURES)


@pytest.fixture(autouse=True)
def _no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and repetitions do not depend on what is learnt from them, which takes a while."""
    monkeypatch.setattr("costmodel.calibrate.fit", lambda samples, names, finest="label": {})
    monkeypatch.setattr("costmodel.calibrate.fit_constants", lambda samples, names: {})
    monkeypatch.setattr("costmodel.calibrate.judge", lambda records, names: None)


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Device:
    """Times kernels by their keys; preparing and running them takes the clock's time."""

    def __init__(
        self,
        clock: Clock,
        prepare_s: float = 0.2,
        refill_s: float = 0.03,
        ns: float = 1e6,
        noise: float = 0.004,
        refused: str = "",
    ) -> None:
        self.clock, self.prepare_s, self.refill_s, self.ns, self.noise, self.refused = (
            clock, prepare_s, refill_s, ns, noise, refused,
        )  # fmt: skip
        self.rng = np.random.default_rng(3)
        self.rounds: list[tuple[str, ...]] = []
        self.asked: list[str] = []
        self.closed = False

    def build(self, kernels: Sequence[Kernel]) -> None:
        self.clock.now_s += 0.5 * self.prepare_s * len(kernels)

    def prepare(self, kernel: Kernel) -> Prepared:
        self.clock.now_s += 0.5 * self.prepare_s
        if self.refused and self.refused in kernel.variant.label:
            self.asked.append(kernel.key)
            raise DeviceError(f"kernel {kernel.variant.label} does not build")
        return Prepared(kernel, (), ())

    def truth_ns(self, key: str) -> float:
        return self.ns * (1 + int(key[:4], 16) / 65536)

    def round(self, prepared: Mapping[str, Prepared], backwards: bool = False, refill: bool = True) -> dict[str, int]:
        assert not backwards, "a session orders its rounds itself"
        self.clock.now_s += self.refill_s * refill
        times = {
            key: round(self.truth_ns(held.kernel.key) * (1 + abs(self.rng.normal(0, self.noise))))
            for key, held in prepared.items()
        }
        self.rounds.append(tuple(prepared))
        self.clock.now_s += sum(times.values()) / 1e9
        return times

    def fits(self, kernel: Kernel) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def candidates() -> Pool:
    return pool_of([small_graph()], DeviceLimits(), CostModel(MODEL).machine, 0, lambda: False, lambda kernel: True)


@pytest.fixture
def pool(candidates: Pool) -> Pool:
    return Pool(candidates._all, seed=0)


def whole(device_: Device, pool: Pool, budget_s: float, chooser=None, **settings):
    """All phases; the session, the model and the budget afterwards."""
    clock = device_.clock
    budget = Budget(budget_s, clock)
    session = Session(device_, "cpu", 0, clock=clock, begin_s=budget.begin_s, **settings)
    work = Calibration(session, MODEL, CostModel(MODEL), budget)
    work.sample(pool, 0.4 if chooser else 0.0)
    if chooser:
        work.ask(chooser, device_.fits)
    work.tighten()
    work.use_up(pool)
    return session, work.model(), budget


# ---- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_s", [20.0, 90.0])
@pytest.mark.parametrize(
    "costs",
    [
        {},
        {"prepare_s": 0.02, "refill_s": 0.0},
        {"prepare_s": 1.5},
        {"ns": 2e7},
        {"noise": 0.3},
        {"refill_s": 0.5},
    ],
    ids=["usual", "quick compiler", "slow compiler", "long kernels", "noisy", "slow refill"],
)
def test_wall_time_keeps_to_the_budget(budget_s: float, costs: dict[str, float], pool: Pool):
    clock = Clock()
    _, model, budget = whole(Device(clock, **costs), pool, budget_s)
    assert budget.spent_s <= 1.1 * budget_s
    assert model.budget_s == pytest.approx(budget.spent_s, abs=0.06)
    assert min(len(m.rounds_ns) for m in model.measurements.values()) >= LEAST_ROUNDS, (
        "no kernel was left half-measured"
    )
    assert budget.spent_s >= 0.75 * budget_s or len(model.measurements) == len(pool), "time that is there is used"


def test_a_planner_that_takes_its_time_is_paid_from_the_budget(pool: Pool):
    clock = Clock()
    given: list[float] = []
    kernels = iter([c.kernel for c in pool._all[::-1]])

    def chooser(model: device.DeviceModel, left_s: float) -> list[Kernel]:
        given.append(left_s)
        clock.now_s += 6.0
        return [next(kernels) for _ in range(15)]

    _, _, budget = whole(Device(clock), pool, 60.0, chooser)
    assert budget.spent_s <= 66
    assert len(given) > 1, "the chooser is asked again"
    assert given == sorted(given, reverse=True)
    assert 0 < given[0] <= 0.4 * 60 + 1


def test_a_planner_that_never_returns_in_time_is_asked_once(pool: Pool):
    clock = Clock()
    asked: list[float] = []

    def chooser(model: device.DeviceModel, left_s: float) -> list[Kernel]:
        asked.append(left_s)
        clock.now_s += left_s
        return [pool._all[-1].kernel]

    _, _, budget = whole(Device(clock), pool, 60.0, chooser)
    assert len(asked) == 1
    assert budget.spent_s <= 66


def test_a_kernel_that_takes_long_is_not_repeated_and_the_rest_of_its_batch_is_chosen_anew(pool: Pool):
    clock = Clock()
    device_ = Device(clock)
    slow = {c.kernel.key for c in pool._all[::9]}
    device_.truth_ns = lambda key: 2e9 if key in slow else 1e6
    session = Session(device_, "cpu", 0, clock=clock, slow_s=0.5)
    work = Calibration(session, MODEL, CostModel(MODEL), Budget(60.0, clock))
    work.sample(pool)
    work.tighten()
    repeated = {key: sum(key in own for own in device_.rounds) for key in session.entries}
    assert slow & repeated.keys()
    assert all(repeated[key] == 1 for key in slow & repeated.keys())
    assert all(count >= LEAST_ROUNDS for key, count in repeated.items() if key not in slow)


def test_what_a_slow_batch_did_not_get_to_is_given_back(pool: Pool):
    clock = Clock()
    session = Session(Device(clock, ns=1e9), "cpu", 0, clock=clock)
    batch = pool.choose({}, CostModel(MODEL), 40)
    tried = session.measure(batch, lambda: 60.0)
    assert 0 < tried < 40, "its first kernels took more of the time than a batch may"
    pool.give_back(batch[tried:])
    again = pool.choose({}, CostModel(MODEL), len(pool))
    assert {c.kernel.key for c in again} == {c.kernel.key for c in pool._all} - {c.kernel.key for c in batch[:tried]}


def test_a_fit_that_takes_long_at_the_end_is_paid_from_the_budget(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    """The whole fit and its judge take 30 times what a quick one does, and that grows with the kernels."""
    clock = Clock()

    def fit(samples, names, finest="label"):
        clock.now_s += len(samples) * (0.0005 if finest == "name" else 0.015)
        return {}

    def judge(records, names):
        clock.now_s += len(records) * 0.015

    monkeypatch.setattr("costmodel.calibrate.fit", fit)
    monkeypatch.setattr("costmodel.calibrate.judge", judge)
    _, model, budget = whole(Device(clock, prepare_s=0.1), pool, 60.0)
    assert len(model.measurements) * 0.03 > 6, "the fit is a tenth of the budget and more"
    assert 45 <= budget.spent_s <= 66


def test_budgets_by_kind():
    assert (budget_seconds("cpu"), budget_seconds("gpu")) == (180.0, 60.0)
    assert budget_seconds("gpu", thorough=True) > budget_seconds("gpu")
    clock = Clock()
    budget = Budget(10.0, clock)
    budget.resume(9.0, 4.0)
    assert (budget.spent_s, budget.left_s) == (9.0, 4.0)
    clock.now_s += 1.0
    assert (budget.spent_s, budget.left_s, budget.share) == (10.0, 3.0, 10 / 13)


# ---- repetitions ---------------------------------------------------------------------------------------------------


class Uneven(Device):
    """A third of the kernels scatters."""

    def scatters(self, key: str) -> bool:
        return int(key[-2:], 16) % 3 == 0

    def round(self, prepared: Mapping[str, Prepared], backwards: bool = False, refill: bool = True) -> dict[str, int]:
        times = super().round(prepared, backwards, refill)
        for key in times:
            if self.scatters(key):
                times[key] = round(self.truth_ns(key) * (1 + 0.15 * self.rng.random()))
        return times


def test_rounds_go_to_kernels_that_are_not_known_tightly(pool: Pool):
    made = Uneven(Clock())
    session, model, _ = whole(made, pool, 60.0)
    counts = {scatters: [] for scatters in (False, True)}
    for key, m in model.measurements.items():
        counts[made.scatters(key)].append(len(m.rounds_ns))
    assert np.median(counts[False]) <= LEAST_ROUNDS + 2
    assert np.median(counts[True]) > 2 * np.median(counts[False])
    assert max(counts[True]) <= MOST_ROUNDS
    assert model.number("kernels_tight") == session.tight() >= len(counts[False])
    assert len(session.entries) - session.tight() == len(session.unsettled())
    for key, m in model.measurements.items():
        assert m.ns == pytest.approx(made.truth_ns(key), rel=0.01 if not made.scatters(key) else 0.15)
    line = describe_timing(model)[0]
    assert line.startswith(f"kernels known tightly: {session.tight()} of {len(session.entries)} kernels")


@pytest.mark.parametrize(("kind", "segments"), [("cpu", 3), ("gpu", 1)])
def test_rounds_stay_interleaved_with_anchors_in_every_segment(kind: str, segments: int, pool: Pool):
    made = Device(Clock())
    session = Session(made, kind, 0, clock=made.clock)
    session.anchor({"compute_1": pool._all[0].kernel, "memory_1": pool._all[1].kernel})
    batch = pool._all[2:102]
    assert session.measure(batch, lambda: 1e6) == 100
    assert all(keys[:2] == ("compute_1", "memory_1") for keys in made.rounds)
    assert max(map(len, made.rounds)) <= 2 + SEGMENT[kind]
    whole_ = [key for keys in made.rounds[-segments:] for key in keys[2:]]
    assert sorted(whole_) == sorted(c.kernel.key for c in batch), "the last round is over the whole batch"
    probes = session.anchors()
    assert set(probes) == {"anchor_compute_1", "anchor_memory_1"}
    assert all(len(p.rounds_ns) == len(made.rounds) for p in probes.values())


def test_what_the_device_refuses_is_told_and_not_asked_for_again(pool: Pool):
    label = Pool(pool._all, 0).choose({}, CostModel(MODEL), 1)[0].kernel.variant.name
    made = Device(Clock(), refused=label)
    session, model, _ = whole(made, pool, 30.0, lambda model, left_s: [c.kernel for c in pool._all[:200]])
    assert session.refused
    assert len(session.refused) == len(set(made.asked)) == len(made.asked), (
        "each was tried once, whatever was asked for later"
    )
    assert model.number("kernels_refused") == len(session.refused)
    assert label in str(model.facts["kernels_refused"].source)
    assert not any(m.variant.startswith(label + "(") for m in model.measurements.values())


# ---- interruptions -------------------------------------------------------------------------------------------------


class Interrupting(Device):
    """Ctrl-C after some launches."""

    def __init__(self, clock: Clock, after: int) -> None:
        super().__init__(clock)
        self.after = after

    def round(self, prepared: Mapping[str, Prepared], backwards: bool = False, refill: bool = True) -> dict[str, int]:
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        return super().round(prepared, backwards, refill)


@pytest.fixture
def journals(tmp_path) -> Iterator[list[Journal]]:
    opened: list[Journal] = []
    yield opened
    for journal in opened:
        journal.close()


@pytest.mark.parametrize("after", [1, 7, 20])
def test_an_interrupted_session_goes_on_with_what_it_has(after: int, candidates: Pool, tmp_path, journals):
    journal = Journal(tmp_path / "j.jsonl", {"q": 1})
    with pytest.raises(KeyboardInterrupt):
        whole(Interrupting(Clock(), after), Pool(candidates._all, 0), 60.0, journal=journal)
    journal.close()
    again = Journal(tmp_path / "j.jsonl", {"q": 1})
    journals.append(again)
    assert len(again.kept.rounds) == after
    before = {key for r in again.kept.rounds for key in r.times_ns}
    assert before
    made = Device(Clock(), prepare_s=0.05)
    session, model, _ = whole(made, Pool(candidates._all, 0), 60.0, kept=again.kept, journal=again)
    assert before < set(model.measurements)
    for key in before:
        first = [r.times_ns[key] for r in again.kept.rounds if key in r.times_ns]
        own = model.measurements[key].rounds_ns
        assert list(own[: len(first)]) == first, "what was measured before comes first"
        assert len(own) >= LEAST_ROUNDS, "kernels known from few rounds were prepared again"
    assert len(model.measurements) == len(session.entries)
