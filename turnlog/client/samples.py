"""A session's samples, read from the server's safetensors reply.

The format is 8 bytes of the header's length, a JSON header and the data
(https://github.com/huggingface/safetensors); reading it needs only numpy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from turnlog.client.columns import require_numpy
from turnlog.errors import NotTurnlog
from turnlog.replies import SamplesMetadata
from turnlog.rows import SampleFields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

META = "_samples_meta"

DTYPES = {"I64": "<i8", "I32": "<i4", "F64": "<f8", "F32": "<f4", "U8": "u1"}
"""The types of the samples' arrays."""


@dataclass(frozen=True)
class Sample:
    """One segment of the session: T tokens, of which the last R are the response.

    arrays: `tokens` int64 [T], `loss_mask` uint8 [R], `rollout_log_probs` float64 [R], and if the engines sent them
        `rollout_routed_experts` int32 [T-1, layers, k] and `rollout_indexer_topk` int32 [T-1, layers, k],
        `rollout_sampling_mask.ids` int32 and `rollout_sampling_mask.offsets` int64 [R+1]. The arrays are writable and
        share one buffer.
    fields: what is no array: `response`, `response_length`, `status`, `reward`, `metadata`, …
    """

    arrays: Mapping[str, Array]
    fields: SampleFields


@dataclass(frozen=True)
class Samples:
    """All segments of a session.

    session: the newest turn's tokens, and of a tree its nodes and leaves, as miles' drivers read them.
    empty_reason: None, or why there is no sample: `no_records`, `all_truncated` by `max_seq_len`, or `incomplete` of a
        snapshot without its agent's end.
    """

    samples: list[Sample]
    session: SamplesMetadata
    empty_reason: str | None


def parse(content: bytes) -> Samples:
    """Raises NotTurnlog for invalid bytes."""
    try:
        tensors = _tensors(bytearray(content))
        meta = json.loads(tensors.pop(META).tobytes())
        samples = [
            Sample(_of(tensors, index), cast(SampleFields, {name: fields[name] for name in fields if name != "nulls"}))
            for index, fields in enumerate(meta["samples"])
        ]
        return Samples(samples, meta["session_metadata"], meta["empty_reason"])
    except (KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
        raise NotTurnlog("a reply that does not hold samples") from error


def _tensors(content: bytearray) -> dict[str, Array]:
    require_numpy("session.samples()")
    import numpy as np

    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    data = memoryview(content)[8 + size :]
    found: dict[str, Array] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found[name] = np.frombuffer(data[start:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def _of(tensors: Mapping[str, Array], index: int) -> dict[str, Array]:
    suffix = f".{index}"
    return {name.removesuffix(suffix): array for name, array in tensors.items() if name.endswith(suffix)}
