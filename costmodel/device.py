"""The device model: what is known about one device, as a TOML file; planning and simulating need no device, only this.

Specification (from the device and its sheet), measurements (raw repetitions, kept), fitted constants (with the error on
kernels that were held out from the fit). A model is a value: calibrating makes a new one, predicting changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import tomli_w

from kernels.spec import DeviceLimits
from layoutopt.errors import DeviceError
from layoutopt.files import write_atomic

__all__ = [
    "CacheLevel",
    "DeviceModel",
    "Fact",
    "FamilyFit",
    "HeldOut",
    "Measurement",
    "Probe",
    "list_builtin",
    "load",
    "loads",
    "save",
]

FORMAT_VERSION = 1
BUILTIN_DIR = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class CacheLevel:
    """One cache, nearest first in ``DeviceModel.caches``; 0 where a number is not known.

    Attributes:
        name: "L1", "texture L1", "L2".
        size_bytes: capacity; of each instance where the cache is not shared.
        line_bytes: what one tag covers.
        ways: associativity.
        shared: one instance serves every compute unit, rather than one each.
        sector_bytes: what one miss fetches; 0 means a whole line.
        serves: "all", or "buffer" / "image" where other accesses pass it by.
        latency_s: of a hit.
        bandwidth_bytes_per_s: of hits, whole device.
        write_back: a store is written on eviction rather than at once.
        write_allocate: a store that misses takes its line in.
        fetch_on_write: it is then fetched, rather than only what was stored kept.
        replacement: "lru", "fifo", "plru" or "random".
        inclusion: "none"; "inclusive" of what nearer caches hold; "exclusive": holds what had to go from them.
        hashed: all bits of an address pick its set, rather than some.
        fetch_bytes: of the last cache, what a miss fetches from memory where that is more than a sector.
        whole_bytes: of a cache in parts, each near some compute units: what all of them hold, where ``size_bytes``
            (which costs go by) is what one has of its own; 0: ``size_bytes``.
        source: where the numbers come from.
        confidence: "high", "medium", "low" or "assumed".
    """

    name: str
    size_bytes: int
    line_bytes: int = 64
    ways: int = 8
    shared: bool = False
    sector_bytes: int = 0
    serves: str = "all"
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    write_back: bool = True
    write_allocate: bool = True
    fetch_on_write: bool = True
    replacement: str = "lru"
    inclusion: str = "none"
    hashed: bool = False
    fetch_bytes: int = 0
    whole_bytes: int = 0
    source: str = ""
    confidence: str = "assumed"

    @property
    def sets(self) -> int:
        """Number of sets."""
        return max(self.size_bytes // (self.line_bytes * self.ways), 1)


@dataclass(frozen=True)
class Fact:
    """A number (SI units, named by its key) or a word, with its source and how far to trust it."""

    value: float | str
    source: str
    confidence: str


@dataclass(frozen=True)
class Probe:
    """A microbenchmark: what was run, how much work one run is, and the raw repetitions."""

    what: str
    work: float
    unit: str
    rounds_ns: tuple[int, ...]

    @property
    def per_s(self) -> float:
        """Median rate in ``unit`` per second."""
        return self.work * 1e9 / max(median(self.rounds_ns), 1)


@dataclass(frozen=True)
class Measurement:
    """One kernel, filed under ``Kernel.key``.

    Attributes:
        variant: the variant's label.
        spec: what it computes, for people.
        rounds_ns: raw repetitions in the order they ran, outliers included.
        ns: the median of those from rounds in which the device was not busy with something else; 0: of all of them.
        features: values in the order of ``DeviceModel.features``.
        held_out: kept away from the fit that ``DeviceModel.held_out`` judges.
        layouts: of its operands, for people; empty in older files.
    """

    variant: str
    spec: str
    rounds_ns: tuple[int, ...]
    features: tuple[float, ...]
    held_out: bool = False
    ns: int = 0
    layouts: str = ""

    @property
    def time_ns(self) -> float:
        """What the kernel is taken to cost."""
        return float(self.ns or median(self.rounds_ns))


@dataclass(frozen=True)
class FamilyFit:
    """Fitted non-negative constants (nanoseconds per unit of each feature) of a variant name, a family or "all".

    Attributes:
        ns_per: coefficient by feature name; an absent feature costs nothing.
        samples: kernels in the fit.
        median_error: median absolute percentage error on those same kernels (the residual, not a test).
        spread_90: nine in ten left-out kernels were off (logarithm) by at most so many times the deviation expected of
            them (``costmodel/deviation.py``); 0: not known.
        error_90: nine in ten left-out kernels were off (logarithm) by at most this; 0: not known.
        corrected: of a family: its predictions are corrected by what similar kernels deviated.
    """

    ns_per: Mapping[str, float]
    samples: int
    median_error: float
    spread_90: float = 0.0
    error_90: float = 0.0
    corrected: bool = False


@dataclass(frozen=True)
class HeldOut:
    """Error on kernels that no fit or choice had seen: absolute percentage errors as fractions, Kendall's tau over
    all of them (``tau``) and the mean over groups of kernels that compute the same spec (``tau_within_spec``).
    ``covered_90`` is the share of kernels within the 90% interval of their prediction, ``half_width_90`` what the
    median interval allows above the prediction, as a fraction of it; both 0 in files older than intervals.
    """

    kernels: int
    median_error: float
    p90_error: float
    within_10: float
    within_20: float
    tau: float
    tau_within_spec: float
    fitted_on: int
    date: str
    covered_90: float = 0.0
    half_width_90: float = 0.0


@dataclass(frozen=True)
class DeviceModel:
    """See the module docstring.

    Attributes:
        name: the device's own name.
        driver: driver version, as the device reports it.
        platform: OpenCL platform name and version; empty for a model made from public facts.
        limits: what the device allows.
        origin: "calibrated" or "modelled" (from public facts, never measured).
        date: ISO date and time of the calibration or of the facts.
        caches: nearest first.
        facts: numbers by key: ``flops_per_s``, ``memory_bytes_per_s``, ``launch_s`` are what the roofline needs.
        unknown: what nobody has published and no one here has measured.
        probes: microbenchmarks by name.
        features: names of the features that ``measurements`` list.
        measurements: by kernel key.
        constants: fits by variant name ("contraction.outer"), family ("contraction") and "all".
        held_out: the error report of the fit, if there is a fit.
        budget_s: time that the calibration took.
        graphs: hashes of the graphs whose plans' kernels were measured.
    """

    name: str
    driver: str
    platform: str
    limits: DeviceLimits
    origin: str = "modelled"
    date: str = ""
    caches: tuple[CacheLevel, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    probes: Mapping[str, Probe] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    constants: Mapping[str, FamilyFit] = field(default_factory=dict)
    held_out: HeldOut | None = None
    budget_s: float = 0.0
    graphs: tuple[str, ...] = ()

    def number(self, key: str) -> float:
        """A numeric fact.

        Raises:
            DeviceError: the model does not state it.
        """
        fact = self.facts.get(key)
        if fact is None or isinstance(fact.value, str):
            stated = ", ".join(sorted(self.facts)) or "none"
            raise DeviceError(f"device model {self.name!r} states no number {key!r} (facts stated: {stated}): add it")
        return float(fact.value)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical content: what a plan is bound to. A new calibration has a new hash."""
        typed = msgspec.convert(dataclasses.asdict(self), DeviceModel)  # numbers take their declared types
        # asdict rather than msgspec's encoder, which leaves out defaults that a file did not state.
        content = dataclasses.asdict(typed)
        # Models made before there were these entries keep their hash.
        _drop_unset(content["limits"], ("image_max_buffer_texels",))
        for cache in content["caches"]:
            _drop_usual(cache, ("fetch_on_write", "replacement", "inclusion", "hashed", "fetch_bytes", "whole_bytes"))
        for fitted in content["constants"].values():
            _drop_unset(fitted, ("spread_90", "error_90", "corrected"))
        for taken in content["measurements"].values():
            _drop_unset(taken, ("layouts",))
        _drop_unset(content["held_out"] or {}, ("covered_90", "half_width_90"))
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()

    def _repr_html_(self) -> str:
        from costmodel.display import device_html

        return device_html(self)


def _drop_unset(table: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if not table.get(key):
            table.pop(key, None)


def _drop_usual(cache: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if cache[key] == getattr(CacheLevel, key):
            del cache[key]


# ---- files ------------------------------------------------------------------------------------------------------


def _plain(model: DeviceModel) -> dict[str, Any]:
    body = msgspec.to_builtins(dataclasses.asdict(model))
    body = {key: value for key, value in body.items() if value is not None}
    # Plain values first: a TOML key after a table would belong to the table.
    tables = {key: value for key, value in body.items() if isinstance(value, dict)}
    return {"format": FORMAT_VERSION} | {k: v for k, v in body.items() if k not in tables} | tables


def dumps(model: DeviceModel) -> str:
    """The model as TOML; raw repetitions and features stay on one line each."""
    body = _plain(model)
    records, probes = body.pop("measurements", {}), body.pop("probes", {})
    lines = [tomli_w.dumps(body)]
    for name, p in probes.items():
        lines.append(
            f"[probes.{_quoted(name)}]\nwhat = {_quoted(p['what'])}\nwork = {float(p['work'])}\n"
            f"unit = {_quoted(p['unit'])}\nrounds_ns = {list(p['rounds_ns'])}\n"
        )
    for key, m in records.items():
        lines.append(
            f"[measurements.{key}]\nvariant = {_quoted(m['variant'])}\nspec = {_quoted(m['spec'])}\n"
            f"rounds_ns = {list(m['rounds_ns'])}\nfeatures = {list(m['features'])}\n"
            f"held_out = {str(m['held_out']).lower()}\nns = {m['ns']}\n"
            + (f"layouts = {_quoted(m['layouts'])}\n" if m["layouts"] else "")
        )
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def loads(text: str, where: str = "device model") -> DeviceModel:
    """The model in ``text``; ``where`` names it in errors.

    Raises:
        DeviceError: no TOML, another format, a missing, misspelt or mistyped entry.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DeviceError(f"{where} is damaged ({error}): write it anew with `layoutopt calibrate`") from error
    version = raw.pop("format", None)
    if version != FORMAT_VERSION:
        raise DeviceError(
            f"{where} has device model format {version}, this layoutopt reads {FORMAT_VERSION}: "
            "write it anew with `layoutopt calibrate`"
        )
    try:
        model = msgspec.convert(raw, DeviceModel)
    except msgspec.ValidationError as error:
        raise DeviceError(f"{where} is not a device model ({error}): correct that entry or calibrate anew") from error
    _refuse_unknown(raw, model, where)
    return model


def _refuse_unknown(raw: dict[str, Any], model: DeviceModel, where: str) -> None:
    parts: list[tuple[str, Mapping[str, Any], type]] = [("", raw, DeviceModel)]
    parts += [("limits.", raw["limits"], DeviceLimits)]
    parts += [("caches.", cache, CacheLevel) for cache in raw.get("caches", [])]
    for prefix, table, kind in parts:
        known = {f.name for f in dataclasses.fields(kind)}
        for key in table:
            if key not in known:
                raise DeviceError(f"{where} has the unknown entry {prefix}{key}; known: {', '.join(sorted(known))}")
    for key, m in model.measurements.items():
        if not m.rounds_ns or len(m.features) != len(model.features):
            raise DeviceError(
                f"{where}: measurement {key} has {len(m.rounds_ns)} repetitions and {len(m.features)} features; "
                f"expected at least 1 and {len(model.features)}: calibrate anew"
            )


def save(model: DeviceModel, path: str | os.PathLike[str]) -> None:
    """Write the model; nothing half-written stays behind."""
    write_atomic(path, dumps(model))


def list_builtin() -> tuple[str, ...]:
    """Names of the models shipped with the package."""
    return tuple(sorted(p.stem for p in BUILTIN_DIR.glob("*.toml")))


def load(name_or_path: str | os.PathLike[str]) -> DeviceModel:
    """Read a device model: a shipped name (see :func:`list_builtin`) or a file.

    Raises:
        DeviceError: there is none of that name, or it is no device model.
    """
    text = os.fspath(name_or_path)
    path = BUILTIN_DIR / f"{text}.toml" if text in list_builtin() else Path(text)
    if not path.is_file():
        raise DeviceError(
            f"no device model {text!r}: expected a file, or one of {', '.join(list_builtin())}; "
            "`layoutopt calibrate` writes one for a device that is here"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise DeviceError(f"{path} cannot be read as a device model ({error}): calibrate anew") from error
    return loads(content, str(path))
