from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InputType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INPUT_TYPE_UNSPECIFIED: _ClassVar[InputType]
    INPUT_TYPE_QUERY: _ClassVar[InputType]
    INPUT_TYPE_DOCUMENT: _ClassVar[InputType]

class OutputDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_DTYPE_UNSPECIFIED: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_FLOAT32: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_FLOAT16: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_INT8: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_BINARY: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_UBINARY: _ClassVar[OutputDtype]

class Truncate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATE_UNSPECIFIED: _ClassVar[Truncate]
    TRUNCATE_NONE: _ClassVar[Truncate]
    TRUNCATE_LEFT: _ClassVar[Truncate]
    TRUNCATE_RIGHT: _ClassVar[Truncate]

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_UNSPECIFIED: _ClassVar[Lane]
    LANE_QUERY: _ClassVar[Lane]
    LANE_BULK: _ClassVar[Lane]

class OnError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_ERROR_UNSPECIFIED: _ClassVar[OnError]
    ON_ERROR_FAIL: _ClassVar[OnError]
    ON_ERROR_PER_INPUT: _ClassVar[OnError]
INPUT_TYPE_UNSPECIFIED: InputType
INPUT_TYPE_QUERY: InputType
INPUT_TYPE_DOCUMENT: InputType
OUTPUT_DTYPE_UNSPECIFIED: OutputDtype
OUTPUT_DTYPE_FLOAT32: OutputDtype
OUTPUT_DTYPE_FLOAT16: OutputDtype
OUTPUT_DTYPE_INT8: OutputDtype
OUTPUT_DTYPE_BINARY: OutputDtype
OUTPUT_DTYPE_UBINARY: OutputDtype
TRUNCATE_UNSPECIFIED: Truncate
TRUNCATE_NONE: Truncate
TRUNCATE_LEFT: Truncate
TRUNCATE_RIGHT: Truncate
LANE_UNSPECIFIED: Lane
LANE_QUERY: Lane
LANE_BULK: Lane
ON_ERROR_UNSPECIFIED: OnError
ON_ERROR_FAIL: OnError
ON_ERROR_PER_INPUT: OnError

class EmbedRequest(_message.Message):
    __slots__ = ("texts", "token_ids", "input_type", "prompt_name", "instruction", "dimensions", "output_dtype", "normalize", "truncate", "lane", "on_error", "request_id", "model", "expect_space")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    ON_ERROR_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXPECT_SPACE_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    input_type: InputType
    prompt_name: str
    instruction: str
    dimensions: int
    output_dtype: OutputDtype
    normalize: bool
    truncate: Truncate
    lane: Lane
    on_error: OnError
    request_id: str
    model: str
    expect_space: str
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., input_type: _Optional[_Union[InputType, str]] = ..., prompt_name: _Optional[str] = ..., instruction: _Optional[str] = ..., dimensions: _Optional[int] = ..., output_dtype: _Optional[_Union[OutputDtype, str]] = ..., normalize: bool = ..., truncate: _Optional[_Union[Truncate, str]] = ..., lane: _Optional[_Union[Lane, str]] = ..., on_error: _Optional[_Union[OnError, str]] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., expect_space: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("vectors", "count", "dims", "output_dtype", "scales", "token_counts", "truncated", "errors", "model", "space_id", "numerics_id", "request_id", "times")
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    vectors: bytes
    count: int
    dims: int
    output_dtype: OutputDtype
    scales: bytes
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    truncated: _containers.RepeatedScalarFieldContainer[int]
    errors: _containers.RepeatedCompositeFieldContainer[InputError]
    model: str
    space_id: str
    numerics_id: str
    request_id: str
    times: StageTimes
    def __init__(self, vectors: _Optional[bytes] = ..., count: _Optional[int] = ..., dims: _Optional[int] = ..., output_dtype: _Optional[_Union[OutputDtype, str]] = ..., scales: _Optional[bytes] = ..., token_counts: _Optional[_Iterable[int]] = ..., truncated: _Optional[_Iterable[int]] = ..., errors: _Optional[_Iterable[_Union[InputError, _Mapping]]] = ..., model: _Optional[str] = ..., space_id: _Optional[str] = ..., numerics_id: _Optional[str] = ..., request_id: _Optional[str] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class InputError(_message.Message):
    __slots__ = ("index", "code", "message")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    code: str
    message: str
    def __init__(self, index: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("tokenize_ms", "queue_ms", "forward_ms", "pack_ms", "reply_ms", "total_ms")
    TOKENIZE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    PACK_MS_FIELD_NUMBER: _ClassVar[int]
    REPLY_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    tokenize_ms: float
    queue_ms: float
    forward_ms: float
    pack_ms: float
    reply_ms: float
    total_ms: float
    def __init__(self, tokenize_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., pack_ms: _Optional[float] = ..., reply_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class EmbedStreamResponse(_message.Message):
    __slots__ = ("request_id", "response", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    response: EmbedResponse
    error: StreamError
    def __init__(self, request_id: _Optional[str] = ..., response: _Optional[_Union[EmbedResponse, _Mapping]] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("grpc_code", "code", "message", "param", "retry_after_ms")
    GRPC_CODE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    grpc_code: int
    code: str
    message: str
    param: str
    retry_after_ms: int
    def __init__(self, grpc_code: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("texts", "input_type", "prompt_name", "instruction", "add_special_tokens", "with_offsets", "model")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    input_type: InputType
    prompt_name: str
    instruction: str
    add_special_tokens: bool
    with_offsets: bool
    model: str
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., input_type: _Optional[_Union[InputType, str]] = ..., prompt_name: _Optional[str] = ..., instruction: _Optional[str] = ..., add_special_tokens: bool = ..., with_offsets: bool = ..., model: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedCompositeFieldContainer[TokenizedText]
    def __init__(self, texts: _Optional[_Iterable[_Union[TokenizedText, _Mapping]]] = ...) -> None: ...

class TokenizedText(_message.Message):
    __slots__ = ("ids", "starts", "ends")
    IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "served_names", "dims", "max_input_tokens", "pooling", "normalized", "prompts", "default_prompt_name", "similarity", "dtype", "device", "output_dtypes", "matryoshka_dims", "vocab_size", "space_id", "numerics_id", "limits", "frontends", "server_version")
    class PromptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPES_FIELD_NUMBER: _ClassVar[int]
    MATRYOSHKA_DIMS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    served_names: _containers.RepeatedScalarFieldContainer[str]
    dims: int
    max_input_tokens: int
    pooling: str
    normalized: bool
    prompts: _containers.ScalarMap[str, str]
    default_prompt_name: str
    similarity: str
    dtype: str
    device: str
    output_dtypes: _containers.RepeatedScalarFieldContainer[OutputDtype]
    matryoshka_dims: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    space_id: str
    numerics_id: str
    limits: Limits
    frontends: int
    server_version: str
    def __init__(self, name: _Optional[str] = ..., served_names: _Optional[_Iterable[str]] = ..., dims: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., pooling: _Optional[str] = ..., normalized: bool = ..., prompts: _Optional[_Mapping[str, str]] = ..., default_prompt_name: _Optional[str] = ..., similarity: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., output_dtypes: _Optional[_Iterable[_Union[OutputDtype, str]]] = ..., matryoshka_dims: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., space_id: _Optional[str] = ..., numerics_id: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., frontends: _Optional[int] = ..., server_version: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_inputs", "max_body_bytes", "max_queued_tokens", "max_batch_tokens", "request_timeout_s")
    MAX_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    max_inputs: int
    max_body_bytes: int
    max_queued_tokens: int
    max_batch_tokens: int
    request_timeout_s: float
    def __init__(self, max_inputs: _Optional[int] = ..., max_body_bytes: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., request_timeout_s: _Optional[float] = ...) -> None: ...
