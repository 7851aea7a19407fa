"""Write a request message from Python values, naming the input or option that cannot be written.
Pure: knows the protocol's messages, and must not know channels, the model or the server's limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from embedserve.v1 import embedding_pb2 as pb
from embedserve_client.errors import BadRequest

Inputs = Sequence[str] | Sequence[Sequence[int]]
InputType = Literal["query", "document"]
Dtype = Literal["float32", "float16", "int8", "binary", "ubinary"]
Truncate = Literal["none", "left", "right"]
Lane = Literal["auto", "query", "bulk"]
OnError = Literal["fail", "per_input"]

INPUT_TYPES: Mapping[str, int] = {"query": pb.INPUT_TYPE_QUERY, "document": pb.INPUT_TYPE_DOCUMENT}
DTYPES: Mapping[str, int] = {
    "float32": pb.OUTPUT_DTYPE_FLOAT32,
    "float16": pb.OUTPUT_DTYPE_FLOAT16,
    "int8": pb.OUTPUT_DTYPE_INT8,
    "binary": pb.OUTPUT_DTYPE_BINARY,
    "ubinary": pb.OUTPUT_DTYPE_UBINARY,
}
TRUNCATES: Mapping[str, int] = {"none": pb.TRUNCATE_NONE, "left": pb.TRUNCATE_LEFT, "right": pb.TRUNCATE_RIGHT}
LANES: Mapping[str, int] = {"auto": pb.LANE_UNSPECIFIED, "query": pb.LANE_QUERY, "bulk": pb.LANE_BULK}
ON_ERRORS: Mapping[str, int] = {"fail": pb.ON_ERROR_FAIL, "per_input": pb.ON_ERROR_PER_INPUT}


class EmbedOptions(TypedDict, total=False):
    """What may be said about a request beside its inputs; `EmbedClient.embed` explains each."""

    input_type: InputType | None
    prompt_name: str | None
    instruction: str | None
    dimensions: int | None
    dtype: Dtype
    normalize: bool | None
    truncate: Truncate | None
    lane: Lane | None
    model: str | None
    request_id: str | None
    expect_space: str | None


def build_request(inputs: Inputs, *, on_error: OnError = "fail", **options: Unpack[EmbedOptions]) -> pb.EmbedRequest:
    """Raises BadRequest for what the message cannot hold, TypeError for an unknown option."""
    request = _request_without_inputs(on_error=on_error, **options)
    if isinstance(inputs, str | bytes):
        raise _bad_value("texts", "inputs is one text; send a list of texts, as [text].")
    given: list[Any] = list(inputs)  # texts or token ids; the message checks which
    try:
        if all(isinstance(one, str) for one in given):
            request.texts.extend(given)
        else:
            request.token_ids.extend(_token_ids(one) for one in given)
    except (TypeError, ValueError) as error:
        raise _bad_input(given) from error
    return request


def _request_without_inputs(
    *,
    on_error: OnError,
    input_type: InputType | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    dimensions: int | None = None,
    dtype: Dtype = "float32",
    normalize: bool | None = None,
    truncate: Truncate | None = None,
    lane: Lane | None = None,
    model: str | None = None,
    request_id: str | None = None,
    expect_space: str | None = None,
) -> pb.EmbedRequest:
    fields = {
        "input_type": _number("input_type", input_type, INPUT_TYPES),
        "prompt_name": prompt_name,
        "instruction": instruction,
        "dimensions": dimensions,
        "output_dtype": _number("dtype", dtype, DTYPES),
        "normalize": normalize,
        "truncate": _number("truncate", truncate, TRUNCATES),
        "lane": _number("lane", lane, LANES),
        "on_error": _number("on_error", on_error, ON_ERRORS),
        "model": model,
        "request_id": request_id,
        "expect_space": expect_space,
    }
    request = pb.EmbedRequest()
    for name, value in fields.items():
        if value is None:  # left unset: the server's own default
            continue
        try:
            setattr(request, name, value)
        except (TypeError, ValueError) as error:
            raise _bad_value(name, f"{name} is {value!r}, which cannot be sent: {error}") from error
    return request


def _number(option: str, value: str | None, numbers: Mapping[str, int]) -> int | None:
    if value is None:
        return None
    if value not in numbers:
        allowed = ", ".join(f'"{name}"' for name in numbers)
        raise _bad_value(option, f"{option} is {value!r}; it can be one of {allowed}.")
    return numbers[value]


def _token_ids(ids: Any) -> pb.TokenIds:
    if ids is None or isinstance(ids, bytes):  # which the message would take, for no ids and for one id a byte
        raise TypeError(f"it is {ids!r:.40}")
    return pb.TokenIds(ids=ids)


def _bad_input(inputs: Iterable[object]) -> BadRequest:
    """Which input it is, and why. Looked for only after something failed."""
    are_texts = isinstance(next(iter(inputs)), str)
    field = "texts" if are_texts else "token_ids"
    for index, one in enumerate(inputs):
        if fault := _fault_of_text(one) if are_texts else _fault_of_ids(one):
            return _bad_value(f"{field}[{index}]", f"input {index} {fault}")
    raise AssertionError("the message refused inputs in which there is no fault")


def _fault_of_text(text: object) -> str | None:
    if not isinstance(text, str):
        return f"is a {type(text).__name__} and input 0 is a text; send either texts or lists of token ids."
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(text[error.start]):04X} at character {error.start}"
        return f'has a lone surrogate ({surrogate}); send text.encode("utf-8", "replace").decode(), or mend its source.'
    return None


def _fault_of_ids(ids: object) -> str | None:
    if isinstance(ids, str):
        return "is a text and input 0 is not; send either texts or lists of token ids."
    try:
        _token_ids(ids)
    except (TypeError, ValueError) as error:
        return f"is not a list of token ids, which are whole numbers from 0 to {2**32 - 1}: {error}"
    return None


def _bad_value(param: str, message: str) -> BadRequest:
    return BadRequest(message, param=param, code="invalid_value")  # the server's code for the same mistake
