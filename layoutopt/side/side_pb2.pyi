from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromDevice(_message.Message):
    __slots__ = ("open", "step", "cached", "supply", "fetch")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SUPPLY_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    open: Open
    step: Step
    cached: TrainFromCache
    supply: Supply
    fetch: Fetch
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., cached: _Optional[_Union[TrainFromCache, _Mapping]] = ..., supply: _Optional[_Union[Supply, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class FromServer(_message.Message):
    __slots__ = ("opened", "ack", "need", "weights", "refused")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    ack: Ack
    need: Need
    weights: Weights
    refused: Refused
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., need: _Optional[_Union[Need, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("version", "task", "head", "anew")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    version: int
    task: Task
    head: _containers.RepeatedCompositeFieldContainer[Tensor]
    anew: bool
    def __init__(self, version: _Optional[int] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., head: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., anew: _Optional[bool] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("model", "graph", "width", "taps", "format", "tokens", "seq", "batch", "classes", "mode", "pooling", "pooler", "rank", "gate", "optimizer", "lr", "weight_decay", "schedule", "warmup", "steps", "seed")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TAPS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    POOLER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    model: str
    graph: str
    width: int
    taps: _containers.RepeatedScalarFieldContainer[str]
    format: str
    tokens: str
    seq: int
    batch: int
    classes: int
    mode: str
    pooling: str
    pooler: bool
    rank: int
    gate: float
    optimizer: str
    lr: float
    weight_decay: float
    schedule: str
    warmup: int
    steps: int
    seed: int
    def __init__(self, model: _Optional[str] = ..., graph: _Optional[str] = ..., width: _Optional[int] = ..., taps: _Optional[_Iterable[str]] = ..., format: _Optional[str] = ..., tokens: _Optional[str] = ..., seq: _Optional[int] = ..., batch: _Optional[int] = ..., classes: _Optional[int] = ..., mode: _Optional[str] = ..., pooling: _Optional[str] = ..., pooler: _Optional[bool] = ..., rank: _Optional[int] = ..., gate: _Optional[float] = ..., optimizer: _Optional[str] = ..., lr: _Optional[float] = ..., weight_decay: _Optional[float] = ..., schedule: _Optional[str] = ..., warmup: _Optional[int] = ..., steps: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step", "rows")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    step: int
    rows: Rows
    def __init__(self, step: _Optional[int] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("samples", "taps", "mask", "labels", "differences")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TAPS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    taps: _containers.RepeatedCompositeFieldContainer[Tap]
    mask: bytes
    labels: bytes
    differences: bytes
    def __init__(self, samples: _Optional[_Iterable[int]] = ..., taps: _Optional[_Iterable[_Union[Tap, _Mapping]]] = ..., mask: _Optional[bytes] = ..., labels: _Optional[bytes] = ..., differences: _Optional[bytes] = ...) -> None: ...

class Tap(_message.Message):
    __slots__ = ("words", "scales")
    WORDS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    words: bytes
    scales: bytes
    def __init__(self, words: _Optional[bytes] = ..., scales: _Optional[bytes] = ...) -> None: ...

class TrainFromCache(_message.Message):
    __slots__ = ("first_step", "orders")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    def __init__(self, first_step: _Optional[int] = ..., orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, samples: _Optional[_Iterable[int]] = ...) -> None: ...

class Supply(_message.Message):
    __slots__ = ("step", "rows")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    step: int
    rows: Rows
    def __init__(self, step: _Optional[int] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Opened(_message.Message):
    __slots__ = ("next_step", "window_steps", "window_bytes", "window_orders")
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    WINDOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ORDERS_FIELD_NUMBER: _ClassVar[int]
    next_step: int
    window_steps: int
    window_bytes: int
    window_orders: int
    def __init__(self, next_step: _Optional[int] = ..., window_steps: _Optional[int] = ..., window_bytes: _Optional[int] = ..., window_orders: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("step", "loss", "credit_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    credit_bytes: int
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class Need(_message.Message):
    __slots__ = ("step", "samples")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("step", "offset", "total", "data")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    step: int
    offset: int
    total: int
    data: bytes
    def __init__(self, step: _Optional[int] = ..., offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "code")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Refused.Code]
        BAD: _ClassVar[Refused.Code]
        LATER: _ClassVar[Refused.Code]
        SUPERSEDED: _ClassVar[Refused.Code]
    UNKNOWN: Refused.Code
    BAD: Refused.Code
    LATER: Refused.Code
    SUPERSEDED: Refused.Code
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    code: Refused.Code
    def __init__(self, reason: _Optional[str] = ..., code: _Optional[_Union[Refused.Code, str]] = ...) -> None: ...
