from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromLearner(_message.Message):
    __slots__ = ("hello", "heartbeat", "failed", "evaluation", "leaving", "ready", "secure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    failed: Failed
    evaluation: Evaluation
    leaving: Leaving
    ready: Ready
    secure: SecureSum
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., secure: _Optional[_Union[SecureSum, _Mapping]] = ...) -> None: ...

class SecureSum(_message.Message):
    __slots__ = ("kind", "version", "content", "task")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KEY: _ClassVar[SecureSum.Kind]
        STATEMENT: _ClassVar[SecureSum.Kind]
        SHARES: _ClassVar[SecureSum.Kind]
        WINDOW: _ClassVar[SecureSum.Kind]
    KEY: SecureSum.Kind
    STATEMENT: SecureSum.Kind
    SHARES: SecureSum.Kind
    WINDOW: SecureSum.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    kind: SecureSum.Kind
    version: int
    content: bytes
    task: int
    def __init__(self, kind: _Optional[_Union[SecureSum.Kind, str]] = ..., version: _Optional[int] = ..., content: _Optional[bytes] = ..., task: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "software", "instance", "run", "task", "unix_time")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    software: str
    instance: str
    run: str
    task: int
    unix_time: float
    def __init__(self, protocol: _Optional[int] = ..., software: _Optional[str] = ..., instance: _Optional[str] = ..., run: _Optional[str] = ..., task: _Optional[int] = ..., unix_time: _Optional[float] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("examples", "batch_size", "evaluation_examples", "layout", "steps_left", "larger_batches")
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEFT_FIELD_NUMBER: _ClassVar[int]
    LARGER_BATCHES_FIELD_NUMBER: _ClassVar[int]
    examples: int
    batch_size: int
    evaluation_examples: int
    layout: str
    steps_left: int
    larger_batches: bool
    def __init__(self, examples: _Optional[int] = ..., batch_size: _Optional[int] = ..., evaluation_examples: _Optional[int] = ..., layout: _Optional[str] = ..., steps_left: _Optional[int] = ..., larger_batches: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("task", "steps")
    TASK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    task: int
    steps: int
    def __init__(self, task: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("kind", "rule", "reference")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Cause.Kind]
        SITE_CODE: _ClassVar[Cause.Kind]
        SETUP: _ClassVar[Cause.Kind]
        NETWORK_DIFFERS: _ClassVar[Cause.Kind]
        DATA_NOT_FINITE: _ClassVar[Cause.Kind]
        DIVERGED: _ClassVar[Cause.Kind]
        OUT_OF_MEMORY: _ClassVar[Cause.Kind]
        DISK: _ClassVar[Cause.Kind]
        PROCESS_DIED: _ClassVar[Cause.Kind]
        ABANDONED: _ClassVar[Cause.Kind]
        MODEL_NOT_FETCHED: _ClassVar[Cause.Kind]
        UPDATE_LOST: _ClassVar[Cause.Kind]
        SITE_POLICY: _ClassVar[Cause.Kind]
        STOPPED: _ClassVar[Cause.Kind]
        PRIVACY_BUDGET: _ClassVar[Cause.Kind]
    UNKNOWN: Cause.Kind
    SITE_CODE: Cause.Kind
    SETUP: Cause.Kind
    NETWORK_DIFFERS: Cause.Kind
    DATA_NOT_FINITE: Cause.Kind
    DIVERGED: Cause.Kind
    OUT_OF_MEMORY: Cause.Kind
    DISK: Cause.Kind
    PROCESS_DIED: Cause.Kind
    ABANDONED: Cause.Kind
    MODEL_NOT_FETCHED: Cause.Kind
    UPDATE_LOST: Cause.Kind
    SITE_POLICY: Cause.Kind
    STOPPED: Cause.Kind
    PRIVACY_BUDGET: Cause.Kind
    class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NO_RULE: _ClassVar[Cause.Rule]
        FEDERATION: _ClassVar[Cause.Rule]
        CONTROLLER: _ClassVar[Cause.Rule]
        HOURS: _ClassVar[Cause.Rule]
        TASK_SECONDS: _ClassVar[Cause.Rule]
        TASK_STEPS: _ClassVar[Cause.Rule]
        DOWNLOAD: _ClassVar[Cause.Rule]
        MEMBERS: _ClassVar[Cause.Rule]
        UNREADABLE: _ClassVar[Cause.Rule]
        MASKS: _ClassVar[Cause.Rule]
        PEERS: _ClassVar[Cause.Rule]
        COLLUDERS: _ClassVar[Cause.Rule]
        MASKED_WINDOWS: _ClassVar[Cause.Rule]
    NO_RULE: Cause.Rule
    FEDERATION: Cause.Rule
    CONTROLLER: Cause.Rule
    HOURS: Cause.Rule
    TASK_SECONDS: Cause.Rule
    TASK_STEPS: Cause.Rule
    DOWNLOAD: Cause.Rule
    MEMBERS: Cause.Rule
    UNREADABLE: Cause.Rule
    MASKS: Cause.Rule
    PEERS: Cause.Rule
    COLLUDERS: Cause.Rule
    MASKED_WINDOWS: Cause.Rule
    KIND_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    kind: Cause.Kind
    rule: Cause.Rule
    reference: int
    def __init__(self, kind: _Optional[_Union[Cause.Kind, str]] = ..., rule: _Optional[_Union[Cause.Rule, str]] = ..., reference: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("task", "cause", "steps", "seconds")
    TASK_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    task: int
    cause: Cause
    steps: int
    seconds: float
    def __init__(self, task: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("version", "examples", "metrics", "sums")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Sums
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Sums, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    version: int
    examples: int
    metrics: _containers.ScalarMap[str, float]
    sums: _containers.MessageMap[str, Sums]
    def __init__(self, version: _Optional[int] = ..., examples: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., sums: _Optional[_Mapping[str, Sums]] = ...) -> None: ...

class Sums(_message.Message):
    __slots__ = ("kind", "values")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, kind: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: Cause
    def __init__(self, cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class ToLearner(_message.Message):
    __slots__ = ("welcome", "task", "notice", "farewell", "pulse", "evaluate", "secure")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    task: Task
    notice: Notice
    farewell: Farewell
    pulse: Pulse
    evaluate: Evaluate
    secure: SecureSum
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., secure: _Optional[_Union[SecureSum, _Mapping]] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "epoch", "learner", "index", "settings", "layout", "unix_time", "heartbeat_seconds", "chunk_bytes", "task", "members", "metrics")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    learner: str
    index: int
    settings: str
    layout: str
    unix_time: float
    heartbeat_seconds: float
    chunk_bytes: int
    task: int
    members: int
    metrics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ..., learner: _Optional[str] = ..., index: _Optional[int] = ..., settings: _Optional[str] = ..., layout: _Optional[str] = ..., unix_time: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ..., chunk_bytes: _Optional[int] = ..., task: _Optional[int] = ..., members: _Optional[int] = ..., metrics: _Optional[_Iterable[str]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("number", "epoch", "version", "version_steps", "steps", "seconds", "sha256", "bytes", "seal", "rate", "batches_per_step", "opening", "window", "model", "evaluate")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    epoch: int
    version: int
    version_steps: int
    steps: int
    seconds: float
    sha256: str
    bytes: int
    seal: bytes
    rate: float
    batches_per_step: int
    opening: bytes
    window: bool
    model: bytes
    evaluate: bool
    def __init__(self, number: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., version_steps: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., sha256: _Optional[str] = ..., bytes: _Optional[int] = ..., seal: _Optional[bytes] = ..., rate: _Optional[float] = ..., batches_per_step: _Optional[int] = ..., opening: _Optional[bytes] = ..., window: bool = ..., model: _Optional[bytes] = ..., evaluate: bool = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("version", "sha256", "bytes", "seal")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    version: int
    sha256: str
    bytes: int
    seal: bytes
    def __init__(self, version: _Optional[int] = ..., sha256: _Optional[str] = ..., bytes: _Optional[int] = ..., seal: _Optional[bytes] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "text", "task")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INFORMATION: _ClassVar[Notice.Kind]
        COMMITTED: _ClassVar[Notice.Kind]
        REFUSED: _ClassVar[Notice.Kind]
        SET_ASIDE: _ClassVar[Notice.Kind]
    INFORMATION: Notice.Kind
    COMMITTED: Notice.Kind
    REFUSED: Notice.Kind
    SET_ASIDE: Notice.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    kind: Notice.Kind
    text: str
    task: int
    def __init__(self, kind: _Optional[_Union[Notice.Kind, str]] = ..., text: _Optional[str] = ..., task: _Optional[int] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("kind", "reason", "retry_seconds", "version", "sha256", "bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RETRY: _ClassVar[Farewell.Kind]
        FINISHED: _ClassVar[Farewell.Kind]
        REFUSED: _ClassVar[Farewell.Kind]
    RETRY: Farewell.Kind
    FINISHED: Farewell.Kind
    REFUSED: Farewell.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: Farewell.Kind
    reason: str
    retry_seconds: float
    version: int
    sha256: str
    bytes: int
    def __init__(self, kind: _Optional[_Union[Farewell.Kind, str]] = ..., reason: _Optional[str] = ..., retry_seconds: _Optional[float] = ..., version: _Optional[int] = ..., sha256: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class UploadPart(_message.Message):
    __slots__ = ("header", "chunk", "end", "acknowledge")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    chunk: Chunk
    end: UploadEnd
    acknowledge: bool
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., end: _Optional[_Union[UploadEnd, _Mapping]] = ..., acknowledge: bool = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("run", "task", "steps", "seconds", "time_per_batch", "loss", "bytes", "compression_error", "sha256", "seal", "content")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_BATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_ERROR_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    task: int
    steps: int
    seconds: float
    time_per_batch: float
    loss: float
    bytes: int
    compression_error: float
    sha256: str
    seal: bytes
    content: bytes
    def __init__(self, run: _Optional[str] = ..., task: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., time_per_batch: _Optional[float] = ..., loss: _Optional[float] = ..., bytes: _Optional[int] = ..., compression_error: _Optional[float] = ..., sha256: _Optional[str] = ..., seal: _Optional[bytes] = ..., content: _Optional[bytes] = ...) -> None: ...

class UploadEnd(_message.Message):
    __slots__ = ("bytes", "sha256")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    sha256: str
    def __init__(self, bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadAnswer(_message.Message):
    __slots__ = ("received", "receipt")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    received: int
    receipt: Receipt
    def __init__(self, received: _Optional[int] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("verdict", "sequence", "reason")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMMITTED: _ClassVar[Receipt.Verdict]
        ALREADY: _ClassVar[Receipt.Verdict]
        REFUSED: _ClassVar[Receipt.Verdict]
    COMMITTED: Receipt.Verdict
    ALREADY: Receipt.Verdict
    REFUSED: Receipt.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    verdict: Receipt.Verdict
    sequence: int
    reason: str
    def __init__(self, verdict: _Optional[_Union[Receipt.Verdict, str]] = ..., sequence: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("run", "sha256", "offset", "length")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    run: str
    sha256: str
    offset: int
    length: int
    def __init__(self, run: _Optional[str] = ..., sha256: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class AdminRequest(_message.Message):
    __slots__ = ("protocol", "command", "arguments")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    command: str
    arguments: str
    def __init__(self, protocol: _Optional[int] = ..., command: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class AdminAnswer(_message.Message):
    __slots__ = ("document",)
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    document: str
    def __init__(self, document: _Optional[str] = ...) -> None: ...
