"""All uses of Flower's internals, which are not part of its public interface; tested with Flower 1.41 and 1.42.

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
"""Error codes that the SuperLink returns for a node that has not replied. The node may have sent a report all the same."""

SERVER_NODE = SUPERLINK_NODE_ID

_LOCAL_RUN = 1
"""Number of a run in this process. Flower's programs are not involved, so any number will do."""

_STATE_RECORD = "ldpfl-state"
"""Name of the record, and of the array in it, that holds an app's serialised state."""

_TTL_S = 3600.0
"""Time to live that an app reads from each message, in seconds. The true one could mark a client."""


def message_for_app(message: Message) -> Message:
    """Return a copy of ``message`` for an app. If the app changes the copy, replies and messages to other clients stay as they are.

    The copy carries only what is the same for all clients. A message's id, node numbers, time and group could mark a client, so they are
    replaced. Records are sorted by name, because the agreement that clients compare does not cover their order. The bytes of arrays are
    shared, and cannot be changed.
    """
    clone = copy.copy(message)
    metadata = copy.copy(message.metadata)
    # Written past Flower's properties, because some of them are read-only.
    metadata.__dict__ |= {"_message_id": "", "_reply_to_message_id": "", "_group_id": "", "_created_at": time.time(), "_ttl": _TTL_S}
    metadata.__dict__ |= {"_run_id": 0, "_src_node_id": 0, "_dst_node_id": 0, "_src_task_id": None, "_dst_task_id": None}
    clone.__dict__["_metadata"] = metadata
    clone.__dict__["_content"] = RecordDict(
        {name: _copy_record(record) for name, record in sorted(message.content.items(), key=itemgetter(0))}
    )
    return clone


def _copy_record(record: ArrayRecord | MetricRecord | ConfigRecord) -> ArrayRecord | MetricRecord | ConfigRecord:
    """Return a copy of ``record``, sorted by key. Arrays are not sorted, because their order is the model's."""
    if isinstance(record, ArrayRecord):
        return ArrayRecord({name: copy.copy(array) for name, array in record.items()})
    entries: Any = dict(sorted(copy.deepcopy(dict(record)).items(), key=itemgetter(0)))
    return type(record)(entries)


def records_to_bytes(records: RecordDict) -> bytes:
    """Serialise ``records`` in Flower's wire format. Reading this format runs no code, unlike pickle."""
    data: bytes = recorddict_to_proto(records).SerializeToString()
    return data


def wrap_serialised(data: bytes) -> RecordDict:
    """Return new records whose only array is ``data``, which :func:`records_to_bytes` serialised. :func:`unwrap_serialised` undoes it.

    In this way, bytes that an app's process has returned can be kept in Flower's context without being parsed.
    """
    return RecordDict({_STATE_RECORD: ArrayRecord({_STATE_RECORD: Array("uint8", (len(data),), "numpy.ndarray", data)})})


def unwrap_serialised(records: RecordDict) -> RecordDict:
    """Return the records inside ``records`` if :func:`wrap_serialised` made them, else ``records`` unchanged."""
    inside = records.array_records.get(_STATE_RECORD)
    return records if inside is None else recorddict_from_proto(ProtoRecordDict.FromString(inside[_STATE_RECORD].data))


def set_message_id(message: Message, identifier: str) -> None:
    """Set the id of ``message``, to which its reply will refer. A grid in this process needs this, because no SuperLink sets ids there."""
    message.metadata.__dict__["_message_id"] = identifier


def local_run() -> Run:
    """Return a run for this process, so that messages can be created outside of Flower's programs."""
    if TaskIdentity._run_id is None:  # Flower's programs set these at their start, and creating a message reads them
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = _LOCAL_RUN, _LOCAL_RUN, SERVER_NODE
    return Run.create_empty(TaskIdentity.run_id)
