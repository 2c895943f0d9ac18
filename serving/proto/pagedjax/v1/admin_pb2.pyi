from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ("wait_seconds",)
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    wait_seconds: float
    def __init__(self, wait_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("open_requests",)
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    open_requests: int
    def __init__(self, open_requests: _Optional[int] = ...) -> None: ...

class GetBucketsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("tokens", "rows", "decode", "compile_seconds", "temp_bytes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COMPILE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEMP_BYTES_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    rows: int
    decode: bool
    compile_seconds: float
    temp_bytes: int
    def __init__(self, tokens: _Optional[int] = ..., rows: _Optional[int] = ..., decode: _Optional[bool] = ..., compile_seconds: _Optional[float] = ..., temp_bytes: _Optional[int] = ...) -> None: ...

class GetBucketsResponse(_message.Message):
    __slots__ = ("buckets", "computed_tokens", "padding_tokens", "compilations_after_start")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_AFTER_START_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    computed_tokens: int
    padding_tokens: int
    compilations_after_start: int
    def __init__(self, buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., computed_tokens: _Optional[int] = ..., padding_tokens: _Optional[int] = ..., compilations_after_start: _Optional[int] = ...) -> None: ...

class GetShardingReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MeshAxis(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ShardedArray(_message.Message):
    __slots__ = ("name", "shape", "dtype", "spec", "bytes", "bytes_per_device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_DEVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    spec: str
    bytes: int
    bytes_per_device: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., spec: _Optional[str] = ..., bytes: _Optional[int] = ..., bytes_per_device: _Optional[int] = ...) -> None: ...

class GetShardingReportResponse(_message.Message):
    __slots__ = ("devices", "axes", "weights", "pool", "pool_scales")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOL_SCALES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[str]
    axes: _containers.RepeatedCompositeFieldContainer[MeshAxis]
    weights: _containers.RepeatedCompositeFieldContainer[ShardedArray]
    pool: ShardedArray
    pool_scales: ShardedArray
    def __init__(self, devices: _Optional[_Iterable[str]] = ..., axes: _Optional[_Iterable[_Union[MeshAxis, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[ShardedArray, _Mapping]]] = ..., pool: _Optional[_Union[ShardedArray, _Mapping]] = ..., pool_scales: _Optional[_Union[ShardedArray, _Mapping]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("seconds", "index", "what", "why_json")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHY_JSON_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    index: int
    what: str
    why_json: str
    def __init__(self, seconds: _Optional[float] = ..., index: _Optional[int] = ..., what: _Optional[str] = ..., why_json: _Optional[str] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...
