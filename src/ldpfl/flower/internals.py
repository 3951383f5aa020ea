"""All that ldpfl takes from Flower beside its public interface; tried with Flower 1.41.

Flower promises nothing about these names. A new version of Flower needs a look at this file and at its tests only.
"""

from __future__ import annotations

import copy
import sys
from types import FrameType

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client.mod.utils import make_ffn
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["APP_RAISED", "REFUSED", "SERVER_NODE", "Run", "is_outermost", "local_run", "message_for_app", "set_message_id"]

APP_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
REFUSED = ErrorCode.MOD_FAILED_PRECONDITION
SERVER_NODE = SUPERLINK_NODE_ID

_CHAIN = make_ffn.__code__.co_filename
"""The file whose functions call mods, one within the other."""

_LOCAL_RUN = 1


def is_outermost(mod: object) -> bool:
    """Tell whether the caller, ``mod.__call__``, was called by a ClientApp whose first app-wide mod is ``mod``.

    A ClientApp hands its message to a function of Flower's, which calls the first mod. So the call stack tells, and the app's list
    tells that its other functions have the same mod around them.
    """
    link = _caller(sys._getframe(1))
    handler = _caller(link)
    if link is None or handler is None or link.f_code.co_filename != _CHAIN or handler.f_code is not ClientApp.__call__.__code__:
        return False
    mods = handler.f_locals["self"]._mods
    return bool(mods) and mods[0] is mod


def _caller(frame: FrameType | None) -> FrameType | None:
    return None if frame is None else frame.f_back


def message_for_app(message: Message) -> Message:
    """Return a copy of ``message`` that an app may change: neither what a reply says nor what others are sent changes with it.

    The bytes of arrays are shared, and cannot be changed.
    """
    own = copy.copy(message)
    own.__dict__["_metadata"] = copy.copy(message.metadata)
    own.__dict__["_content"] = RecordDict({name: _copied(record) for name, record in message.content.items()})
    return own


def _copied(record: ArrayRecord | MetricRecord | ConfigRecord) -> ArrayRecord | MetricRecord | ConfigRecord:
    if isinstance(record, ArrayRecord):
        return ArrayRecord({name: copy.copy(array) for name, array in record.items()})
    return copy.deepcopy(record)


def set_message_id(message: Message, identifier: str) -> None:
    """Give an instruction the name that its reply refers to; else the SuperLink does."""
    message.metadata.__dict__["_message_id"] = identifier


def local_run() -> Run:
    """Return the run of this process, so that messages can be made outside of Flower's programs."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = _LOCAL_RUN, _LOCAL_RUN, SERVER_NODE
    return Run.create_empty(TaskIdentity.run_id)
