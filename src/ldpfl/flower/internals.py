"""All that ldpfl takes from Flower beside its public interface; tried with Flower 1.41.

Flower promises nothing about these names. A new version of Flower needs a look at this file and at its tests only.
"""

from __future__ import annotations

import copy
import time
from operator import itemgetter
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["ABSENT", "APP_RAISED", "REFUSED", "SERVER_NODE", "Run", "local_run", "message_for_app", "set_message_id"]

APP_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
REFUSED = ErrorCode.MOD_FAILED_PRECONDITION
ABSENT = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""What the SuperLink says of a node that has not replied: what the node has done, it does not know."""

SERVER_NODE = SUPERLINK_NODE_ID

_LOCAL_RUN = 1
_PACKED = "ldpfl-state"
_TTL_S = 3600.0


def message_for_app(message: Message) -> Message:
    """Return a copy of ``message`` that an app may change: neither what a reply says nor what others are sent changes with it.

    It carries nothing but what all clients are asked for: a message's own name, numbers, time and group, which could mark a client, are not
    passed on, and records come in the order of their names, as what all are asked for is compared. The bytes of arrays are shared,
    and cannot be changed.
    """
    own = copy.copy(message)
    metadata = copy.copy(message.metadata)
    metadata.__dict__ |= {"_message_id": "", "_reply_to_message_id": "", "_group_id": "", "_created_at": time.time(), "_ttl": _TTL_S}
    metadata.__dict__ |= {"_run_id": 0, "_src_node_id": 0, "_dst_node_id": 0, "_src_task_id": None, "_dst_task_id": None}
    own.__dict__["_metadata"] = metadata
    own.__dict__["_content"] = RecordDict({name: _copied(record) for name, record in sorted(message.content.items(), key=itemgetter(0))})
    return own


def _copied(record: ArrayRecord | MetricRecord | ConfigRecord) -> ArrayRecord | MetricRecord | ConfigRecord:
    if isinstance(record, ArrayRecord):
        return ArrayRecord({name: copy.copy(array) for name, array in record.items()})
    own: Any = dict(sorted(copy.deepcopy(dict(record)).items(), key=itemgetter(0)))
    return type(record)(own)


def records_to_bytes(records: RecordDict) -> bytes:
    """Return records as Flower puts them on the wire: reading them runs no code."""
    data: bytes = recorddict_to_proto(records).SerializeToString()
    return data


def packed(data: bytes) -> RecordDict:
    """Return records that hold what :func:`records_to_bytes` gave as one array, so that nobody but :func:`unpacked` looks into it."""
    return RecordDict({_PACKED: ArrayRecord({_PACKED: Array("uint8", (len(data),), "numpy.ndarray", data)})})


def unpacked(records: RecordDict) -> RecordDict:
    """Return the records that :func:`packed` has packed, and others as they are."""
    inside = records.array_records.get(_PACKED)
    return records if inside is None else recorddict_from_proto(ProtoRecordDict.FromString(inside[_PACKED].data))


def set_message_id(message: Message, identifier: str) -> None:
    """Give an instruction the name that its reply refers to; else the SuperLink does."""
    message.metadata.__dict__["_message_id"] = identifier


def local_run() -> Run:
    """Return the run of this process, so that messages can be made outside of Flower's programs."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = _LOCAL_RUN, _LOCAL_RUN, SERVER_NODE
    return Run.create_empty(TaskIdentity.run_id)
