"""The exceptions that ldpfl raises on purpose: for a caller's or an operator's mistake, and for what a machine cannot do.

Every message says what was wrong, what was expected, and where the value came from, in one line.
The command line prints it and exits with code 2. What the relay answers, with its HTTP status, is in ``relay/errors.py``.

    LdpflError
    ├── ConfigError             a setting
    ├── DataError               a file, a table, an image
    ├── WriteError              a file that cannot be written
    ├── DeploymentError         a process of the demo
    ├── PrivacyError            nothing was sent
    │   ├── BudgetExhausted
    │   ├── Declined            by the operator's policy
    │   │   ├── NotSetUp
    │   │   ├── NoRelay
    │   │   ├── NoSigningKey
    │   │   ├── OtherSigningKey
    │   │   ├── GivesWeights
    │   │   ├── GivesGradients
    │   │   ├── NamesNoPersons
    │   │   ├── NotReadyApp
    │   │   ├── OtherRunConfig
    │   │   ├── OtherVersion    (a ProtocolError, too)
    │   │   ├── ChargedBefore
    │   │   └── Exhausted       (a BudgetExhausted, too)
    │   ├── TooFewTakePart      fewer nodes than a round needs
    │   │   └── AllDeclined     every node that was asked declined
    │   └── NotFiniteError      reports that add up to no model
    └── ProtocolError           somebody else's message
        ├── RelayRefused
        │   └── RelayRoundOver
        ├── RelayUnreachable
        └── RelayNotReleased
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers of the operating system that mean that no file can be written there. Reading a file never gives them."""


class LdpflError(Exception):
    """Base of all errors that ldpfl raises on purpose.

    A message may quote what a file or somebody else's machine says. It is one line of printable characters all the same: line
    breaks and terminal codes are spelled out, so that they forge no line in a log and no colour on a screen.

    Attributes:
        advice: the fixed part of a message about a user's model. It repeats no name, size or text that the user's code chose, since that
            code may choose them by private values. Empty for most errors.
    """

    def __init__(self, message: object = "", *, advice: str = "") -> None:
        super().__init__(printable(str(message)))
        self.advice = advice


def printable(text: str) -> str:
    """Return ``text`` with every character that is not printable spelled out, as in ``\\n`` or ``\\x1b``."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def listed_names(names: Iterable[str], most: int | None = None) -> str:
    """Return ``names``, such as those of columns, as one text, with commas between them. A name with a comma or space is quoted.

    Of more than ``most`` names, the text lists the first ``most`` and says how many more there are.
    """
    texts = [repr(name) if re.search(r"[\s,]", name) else printable(name) for name in names]
    more = 0 if most is None else len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more:,} more" if more > 0 else "")


def is_text(text: str) -> bool:
    """Return whether ``text`` can be encoded. Python keeps unreadable bytes of a file's name as surrogates, which cannot be encoded."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def shown(value: object) -> str:
    """Return ``value`` as a message may show it. Other values than numbers, texts and paths may be private: only type and size appear."""
    if value is None or isinstance(value, str | Path | Real):
        text = repr(value)
        return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
    size = f" of {len(value)}" if isinstance(value, list | tuple | dict) else ""
    return f"a {type(value).__name__}{size}"


_MAX_SHOWN_CHARACTERS = 80


def first_line(error: BaseException) -> str:
    """Return the first line of the message of another library's ``error``, or the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def error_without_data(error: BaseException) -> str:
    """Return the message of an :class:`LdpflError`; of other errors only type, file and line: their messages may repeat private values."""
    if isinstance(error, LdpflError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    location = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{location}"


class ConfigError(LdpflError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(LdpflError):
    """A data file is missing, corrupt, or not in the expected layout."""


class PrivacyError(LdpflError):
    """Something would have left a client without the stated protection; nothing was sent."""


class BudgetExhausted(PrivacyError):
    """A client's own privacy budget does not allow the requested release."""


class ProtocolError(LdpflError):
    """A received message does not follow the wire format."""


class WriteError(LdpflError):
    """The system refuses to write a file or folder: the disk is full or read-only, for instance. What stood there before still does.

    Attributes:
        reason: what the system says, without the path.
        remedy: what to do about it, such as "make room".
    """

    def __init__(self, message: str, reason: str, remedy: str) -> None:
        super().__init__(message)
        self.reason, self.remedy = reason, remedy


class DeploymentError(LdpflError):
    """A part of a deployment failed.

    Attributes:
        log: the part's last log lines, fit to be shown.
    """

    def __init__(self, message: str, log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log = tuple(log)


class Declined(PrivacyError):
    """A release that the operator's settings do not allow; nothing was sent.

    Its text is for the operator, because it names bounds and files of the node. The server is told only ``public``, which depends on no
    data: it names at most the setting of the policy that does not allow the round, without the setting's value.

    Args:
        setting: the policy's setting that does not allow the release; empty for what is told to nobody but the operator.
    """

    public: str = "declined"

    def __init__(self, message: object = "", setting: str = "") -> None:
        super().__init__(message)
        if setting:
            self.public = f"declined: its policy's {setting} does not allow the round"


class NotSetUp(Declined):
    """The node has no policy or no budget yet. That is no secret, and the server is told, because its operator is the first to notice."""

    public = "declined: this node has no policy and budget"


class NoRelay(Declined):
    """The node has no relay or no token for it, and the terms ask for a report over one. As for :class:`NotSetUp`, that is no secret."""

    public = "declined: this node has no relay and token"


class NoSigningKey(Declined):
    """The node has no key to sign with, and the terms ask for its part of a sum. As for :class:`NotSetUp`, that is no secret."""

    public = "declined: this node has no signing key"


class OtherSigningKey(Declined):
    """The node's token at the relay is not for the key that the node signs with. As for :class:`NotSetUp`, that is no secret."""

    public = "declined: its token at the relay is for another signing key"


class GivesWeights(Declined):
    """The node's app gives trained weights where the terms ask for gradients. Which app a node has is no secret."""

    public = "declined: it gives trained weights; gradients need LdpClientApp(records=...)"


class GivesGradients(Declined):
    """The node's app gives gradients where the terms ask for trained weights. Which app a node has is no secret."""

    public = "declined: it gives gradients; set mechanism.perturbed to 'gradient'"


class NamesNoPersons(Declined):
    """The terms protect persons, and the node's app does not say whose its records are. Which app a node has is no secret."""

    public = "declined: it names no persons; give LdpClientApp(records=..., persons=True)"


class NotReadyApp(Declined):
    """The server counts on ldpfl's own app to compute the gradients, and the node has another app. Which app a node has is no secret."""

    public = "declined: its app is not ldpfl's own; give the app a ServerApp with LdpStrategy"


class AskedForOther(Declined):
    """The server asks for something else than its own config says. The server has written both, so both are no secret to it."""

    public = "declined: the round asks for something else than its config says"


class NoRecordSums(Declined):
    """The terms ask for sums over records that only the ready app forms. Which app a node has is no secret."""

    public = "declined: only ldpfl.flower.apps measures at clients and solves by least squares"


class OtherRunConfig(Declined):
    """The node's run config is not the one that the terms name. The server has given both, so both are no secret to it."""

    public = "declined: other run config; set LdpStrategy(run_config=context.run_config)"


class TooLate(Declined, ProtocolError):
    """The relay's round is over, or ends before this client could send. The relay tells the time to everybody who asks."""

    public = "declined: too little time is left in the relay's round"


class OtherVersion(Declined, ProtocolError):
    """The server's terms are of another version than the node's ldpfl reads. Which version the node reads is no secret."""

    public = "declined: its ldpfl reads other terms: it needs the version that the server has"


class ChargedBefore(Declined):
    """The round was charged before. The server that asks for it knows that."""

    public = "declined: the round was charged before"


class Exhausted(Declined, BudgetExhausted):
    """The lifetime budget, or the number of rounds, does not allow the release."""

    public = "declined: its lifetime budget does not allow the round"


class TooFewTakePart(PrivacyError):
    """Fewer nodes take part than a round needs: the others declined, failed, or did not answer. No report was released."""


class AllDeclined(TooFewTakePart):
    """Every node that was asked has declined: their operators allow no such report, and another round would bring none either."""


class NotFiniteError(PrivacyError):
    """What a round's reports add up to is no model: somebody reported huge values, or training diverged."""


class RelayRefused(ProtocolError):
    """The relay refused; ``status`` is the HTTP status that it said so with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the relay refused ({status}): {message}")
        self.status = status


class RelayRoundOver(RelayRefused):
    """The round takes no uploads any more, or its records were acknowledged and deleted."""


class RelayUnreachable(ProtocolError):
    """No attempt to reach the relay brought an answer that a relay gives."""


class RelayNotReleased(ProtocolError):
    """The round was not released in the time that the aggregator waits for it."""
