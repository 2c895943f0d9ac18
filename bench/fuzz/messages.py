"""gRPC requests: messages filled from their own descriptors, with the odd values that a field may have, and bytes that are none."""

import random
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import vllm_engine_pb2 as vllm

from bench.fuzz.values import FLOATS, FORMS, NO_NUMBERS, TEXTS, spoiled_at
from serving.proto.pagedjax.v1 import admin_pb2
from serving.proto.pagedjax.v1 import inference_pb2 as pb

MODULES = (vllm, pb, admin_pb2, health_pb2, reflection_pb2)
# Drain would end the server that is tried.
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"
}
OFTEN = ("/pagedjax.v1.Inference/Generate", "/pagedjax.v1.Inference/GenerateStream", "/vllm.grpc.engine.VllmEngine/Generate")
BOUNDS = {  # of the integers of a field's type
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
METADATA = ("x-priority", "x-tenant", "traceparent", "authorization", "x-api-key", "x-odd", "x-odd-bin")


@dataclass(frozen=True)
class Sent:
    """A call."""

    method: str
    message: bytes
    metadata: tuple[tuple[str, str | bytes], ...]


def good(rng: random.Random, method: str) -> Message:
    """A message that is mostly right."""
    stop = rng.random() < 0.1
    if method == "/vllm.grpc.engine.VllmEngine/Generate":
        params = vllm.SamplingParams(max_tokens=rng.choice((1, 1, 2)), temperature=rng.choice((0.0, 0.8)), stop=["a"] * stop)
        source = {"text": "Once"} if rng.random() < 0.4 else {"tokenized": vllm.TokenizedInput(input_ids=[1, 403, 407])}
        return vllm.GenerateRequest(sampling_params=params, stream=rng.random() < 0.5, **source)
    prompts = [pb.Prompt(text="Once"), pb.Prompt(tokens=pb.TokenIds(ids=[1, 403]))][: rng.randint(1, 2)]
    if method in OFTEN:
        params = pb.SamplingParams(max_tokens=rng.choice((1, 1, 2)), temperature=rng.choice((0.0, 0.8)), stop=["a"] * stop)
        return pb.GenerateRequest(prompts=prompts, params=params)
    match method.rpartition("/")[2]:
        case "Score":
            return pb.ScoreRequest(prompts=prompts, top_logprobs=1)
        case "Tokenize":
            return pb.TokenizeRequest(texts=["Once", "Tom"])
        case "Detokenize":
            return pb.DetokenizeRequest(tokens=[pb.TokenIds(ids=[1, 403])])
    return message_factory.GetMessageClass(METHODS[method].input_type)()


def scalar(rng: random.Random, field: Any) -> Any:
    """A value that the field's type takes."""
    if field.cpp_type in BOUNDS:
        low, high = BOUNDS[field.cpp_type]
        near = [value for value in (0, 1, 2, 5, 16, 17, 20, 21, 64, 65, 127, 128, 511, 512, -1, -2) if low <= value <= high]
        return rng.choice((*near, low, high, high - 1, rng.randint(low, high)))
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            value = rng.choice((*FLOATS, *NO_NUMBERS, rng.uniform(-2, 2)))
            return value if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE or abs(value) < 3e38 else rng.choice((1e38, -1e38))
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((*(value.number for value in field.enum_type.values), 7, -1, 2**31 - 1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.randint(0, 40))
    forms = [form for form in FORMS if isinstance(form, str)]
    text = rng.choice((*TEXTS, *forms, '{"type": "object"}', "x" * rng.choice((300, 5000)))) * rng.choice((1, 1, 1, 30))
    return text.encode("utf-8", "replace").decode()


def spoil(rng: random.Random, message: Message, depth: int = 4) -> None:
    """Sets some of its fields, or of those in it, to something else."""
    fields = message.DESCRIPTOR.fields
    for _ in range(rng.choice((1, 1, 2, 3)) if fields else 0):
        field: Any = rng.choice(fields)
        if field.type == FieldDescriptor.TYPE_MESSAGE and depth:
            _spoil_inner(rng, message, field, depth)
        elif field.type != FieldDescriptor.TYPE_MESSAGE and field.is_repeated:
            target = getattr(message, field.name)
            target.extend([scalar(rng, field) for _ in range(rng.choice((1, 1, 3, 17, 70)))])
        elif field.type != FieldDescriptor.TYPE_MESSAGE:
            setattr(message, field.name, scalar(rng, field))


def _spoil_inner(rng: random.Random, message: Message, field: Any, depth: int) -> None:
    if is_map(field.message_type):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(rng.choice((1, 2, 301))):
            if value.type == FieldDescriptor.TYPE_MESSAGE:
                spoil(rng, getattr(message, field.name)[scalar(rng, key)], depth - 1)
            else:
                getattr(message, field.name)[scalar(rng, key)] = scalar(rng, value)
    elif field.is_repeated:
        for _ in range(rng.choice((1, 1, 2, 6))):
            spoil(rng, getattr(message, field.name).add(), depth - 1)
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        spoil(rng, inner, depth - 1)


def is_map(kind: Any) -> bool:
    return kind.GetOptions().map_entry


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes that are mostly no message of this type."""
    at = rng.randrange(len(data) + 1)
    match how := rng.randrange(7):
        case 0 | 1 | 2:
            return spoiled_at(rng, data, at, how)
        case 3:
            return rng.randbytes(rng.randint(1, 200))
        case 4:  # a field that nobody knows, which protobuf takes
            return data + b"\xfa\xff\x01\x03abc"
        case 5:  # groups that never end, or end without a beginning
            return data + rng.choice((b"\x0b" * 200, b"\x0c", b"\x1b\x1c"))
    return data + b"\x0a\xff\xff\xff\xff\x0f"  # a length beyond the end


def metadata(rng: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    """What gRPC lets a client send: printable ASCII, and bytes under names that end in -bin."""
    found: list[tuple[str, str | bytes]] = []
    while rng.random() < 0.08:
        name = rng.choice(METADATA)
        texts = ("", "5", "-101", "1e9", "9" * 5000, "Bearer x", "a b", "../x", "t" * 70, "00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        found.append((name, rng.randbytes(20) if name.endswith("-bin") else rng.choice(texts)))
    return tuple(found)


def request(rng: random.Random) -> Sent:
    """One that may be wrong in any way."""
    method = rng.choice(OFTEN) if rng.random() < 0.75 else rng.choice(list(METHODS))
    message = good(rng, method)
    if rng.random() < 0.85:
        spoil(rng, message)
    data = message.SerializeToString()
    return Sent(method, damaged(rng, data) if rng.random() < 0.15 else data, metadata(rng))
