"""Checkpoints of a run: folders ``checkpoint-STEP`` that are there whole or not at all.

A folder is written under another name, brought to disk, and renamed. It holds what ``transformers`` loads
(``model.safetensors``, and ``config.json`` of a module that has one), and what the run goes on from: optimizer state,
where it stands, and the plan, with which its numbers are the same bit by bit on the same device.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import layoutopt.plan as plans
from layoutopt.checkpoint import load_safetensors, save_safetensors
from layoutopt.errors import LayoutOptError
from layoutopt.files import sync_folder, write_atomic
from layoutopt.plan import Plan
from layoutopt.trainer_types import TrainerState

if TYPE_CHECKING:
    from layoutopt.compiled import Compiled

__all__ = ["checkpoints", "found", "load_state", "plan_of", "restore", "save_checkpoint", "save_model", "tidy"]

_MODEL, _OPTIMIZER, _STATE, _PLAN = "model.safetensors", "optimizer.safetensors", "trainer_state.json", "plan.json"
_FORMAT = 1


class _File(msgspec.Struct):
    """What the state's file holds."""

    format: int
    state: TrainerState


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """A run's checkpoints, the earliest first."""
    at = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(folder).glob("checkpoint-*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in at if match and path.is_dir())]


def found(folder: str | os.PathLike[str] | None, asked: bool | str | os.PathLike[str]) -> Path:
    """The checkpoint that is to be resumed.

    Args:
        folder: of the run.
        asked: True for its last one, or a checkpoint.

    Raises:
        LayoutOptError: there is none.
    """
    if not isinstance(asked, bool):
        if not (Path(asked) / _STATE).is_file():
            raise LayoutOptError(f"no checkpoint at {asked}: it has no {_STATE}")
        return Path(asked)
    if folder is None:
        raise LayoutOptError("nothing to resume: give output_dir, or the checkpoint's folder")
    known = checkpoints(folder)
    if not known:
        raise LayoutOptError(f"nothing to resume in {folder}: it holds no checkpoint")
    return known[-1]


def save_model(compiled: Compiled, folder: str | os.PathLike[str]) -> None:
    """Weights, and the configuration of a Hugging Face module, for ``from_pretrained``."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    compiled.save_safetensors(where / _MODEL)
    config: Any = getattr(compiled.module, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        config.architectures = [type(compiled.module).__name__]
        write_atomic(where / "config.json", config.to_json_string())


def save_checkpoint(compiled: Compiled, folder: str | os.PathLike[str], state: TrainerState, keep: int | None) -> Path:
    """Write a checkpoint, then remove the oldest beyond ``keep``.

    Raises:
        LayoutOptError: it cannot be written; what was there stays.
    """
    where = Path(folder)
    target = where / f"checkpoint-{state.global_step}"
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=where))
    try:
        os.chmod(made, where.stat().st_mode & 0o777)
        save_model(compiled, made)
        save_safetensors(made / _OPTIMIZER, compiled.states())
        plans.save(compiled.plan, made / _PLAN)
        data = msgspec.json.encode(_File(_FORMAT, state))
        write_atomic(made / _STATE, msgspec.json.format(data, indent=1) + b"\n")
        for file in made.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(made)
        if target.exists():  # of a run that was resumed from an earlier one
            old = made.with_name(made.name + ".old")
            os.replace(target, old)
            os.replace(made, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(made, target)
        sync_folder(where)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    if keep is not None:
        for old in [path for path in checkpoints(where) if path != target][: -(keep - 1) or None]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def tidy(folder: str | os.PathLike[str]) -> None:
    """Remove what a run that was killed while it saved has left; put back what it was about to replace."""
    for left in sorted(Path(folder).glob(".checkpoint-*")):
        name = left.name.lstrip(".").split(".")[0]
        if left.name.endswith(".old") and not (left.parent / name).exists():
            os.replace(left, left.parent / name)
        else:
            shutil.rmtree(left, ignore_errors=True)


def load_state(checkpoint: Path) -> TrainerState:
    """Where a checkpoint's run stood.

    Raises:
        LayoutOptError: it is damaged.
    """
    file = checkpoint / _STATE
    try:
        read = msgspec.json.decode(file.read_bytes(), type=_File)
    except (msgspec.DecodeError, OSError) as error:
        raise LayoutOptError(f"{file} is damaged ({error}): resume an earlier checkpoint") from error
    if read.format != _FORMAT:
        raise LayoutOptError(f"{file} has format {read.format}, this layoutopt reads {_FORMAT}: start anew")
    return read.state


def plan_of(checkpoint: Path) -> Plan:
    """The plan that a checkpoint's run had."""
    return plans.load(checkpoint / _PLAN)


def restore(compiled: Compiled, checkpoint: Path, state: TrainerState) -> None:
    """Weights and optimizer state of a checkpoint, onto the device.

    Raises:
        GraphError: they are another module's, or damaged.
    """
    states = load_safetensors(compiled.graph, checkpoint / _OPTIMIZER, role="state")
    compiled.load_safetensors(checkpoint / _MODEL)
    compiled.load_states(states, state.optimizer_steps)
