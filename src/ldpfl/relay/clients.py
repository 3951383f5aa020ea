"""Callers of the relay: the client, which uploads, and the aggregator, which opens rounds and pulls mixed records or sums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ldpfl.errors import ProtocolError, RelayNotReleased
from ldpfl.relay.protocol import BLOCK_BYTES, LENGTH, OFFSET, PARTS, RoundStatus, SumTerms, Terms, TokenStatus, parse_upload_id
from ldpfl.relay.requests import (
    Caller,
    LimitedTime,
    is_worth_a_retry,
    number_in_header,
    parse_round_status,
    require_success,
    round_path,
    wrong_server_error,
)
from ldpfl.relay.uniform_order import PART_BYTES, part_count
from ldpfl.transport.sums.envelopes import ENVELOPE_BYTES
from ldpfl.transport.sums.masks import zeros
from ldpfl.util.number_format import counted


class RelayClient(Caller):
    """A client of the relay: uploads its encrypted records, or its share of a sum, once in each round."""

    def signer(self) -> str | None:
        """Return the name of the key that must sign this client's shares of sums. None if its token is for mixed records alone.

        The request carries only the token, so it tells the relay nothing about a round.

        Raises:
            RelayRefused: the relay does not know the token (401), or the token is an aggregator's (403).
            RelayUnreachable: no answer.
            ProtocolError: the server that answers is not a relay of this version.
        """
        answer = self._call("GET", "/v1/token")
        try:
            return TokenStatus.model_validate_json(answer.content).signer
        except ValidationError:
            raise wrong_server_error(answer, "about a token cannot be read") from None

    def upload(self, run: str, number: int, upload_id: str, blob: bytes, *, within_s: float) -> None:
        """Upload ``blob``, the client's records in one piece, and return once the relay has all of it on disk.

        After an interruption the upload resumes where it stopped, any number of times, for up to ``within_s`` seconds: the time that the
        round is open. ``upload_id`` (16 to 64 letters, digits, - and _) makes the call idempotent: a repeated call, also from another
        process, uploads nothing twice.

        Raises:
            RelayRoundOver: the round is over. It is not known whether an upload that was in progress still counted.
            RelayRefused: the relay refuses the upload; the error has its reason.
            RelayUnreachable: ``within_s`` seconds were not enough.
            ProtocolError: the relay's answer is invalid, or the name or the id is not allowed.
        """
        path = f"{round_path(run, number)}/uploads/{quote(parse_upload_id(upload_id), safe='')}"
        retry_policy = LimitedTime(self._patience, self._sleep, self._clock, seconds=max(0.0, within_s))
        # POST begins the upload or finds it, PATCH adds bytes, and HEAD only asks. Each answer says how many bytes the relay has.
        offset = _stored_bytes(self._call("POST", path, retry_policy=retry_policy, headers={LENGTH: str(len(blob))}), blob)
        offset_at_last_progress = offset
        while offset < len(blob):
            response = self._send_once("PATCH", path, retry_policy, headers={OFFSET: str(offset)}, content=blob[offset:])
            # After a wrong offset, the relay is asked below how many bytes it has. Any other refusal raises here.
            if response is not None and not is_worth_a_retry(response) and not _is_wrong_offset(response):
                offset = _stored_bytes(require_success(response), blob)
            if offset < len(blob):  # the upload was interrupted, or the relay answered that it is not complete
                self._wait_or_raise(retry_policy, response)
                offset = _stored_bytes(self._call("HEAD", path, retry_policy=retry_policy), blob)
            if offset >= offset_at_last_progress + BLOCK_BYTES or offset == len(blob):  # less than a block does not count as progress
                offset_at_last_progress = offset
                retry_policy.reset_failures()

    def upload_share(self, run: str, number: int, share: bytes, *, within_s: float) -> None:
        """Upload ``share``, a masked vector with its envelope, to a sum round, and return once it is in the sum, on the relay's disk.

        After an interruption the share is sent again from the start, any number of times, for up to ``within_s`` seconds: the time that the
        round is open. The envelope makes the call idempotent: a repeated call, also from another process, adds nothing twice.

        Raises:
            RelayRoundOver: the round is over. It is not known whether a share that was in progress still counted.
            RelayRefused: the relay refuses the share; status 403 if the token's signing key has not signed it (:meth:`signer`).
            RelayUnreachable: ``within_s`` seconds were not enough.
            ProtocolError: the name of the run or round is not allowed.
        """
        envelope = share[-ENVELOPE_BYTES:]  # its digest is the share's id, so a repeated request has the same path
        path = f"{round_path(run, number)}/shares/{hashlib.sha256(envelope).hexdigest()}"
        self._call("PUT", path, retry_policy=LimitedTime(self._patience, self._sleep, self._clock, max(0.0, within_s)), content=share)


class RelayAggregator(Caller):
    """The aggregator: opens rounds, and pulls the mixed records or the sum."""

    def open_round(self, run: str, number: int, terms: Terms | SumTerms) -> RoundStatus:
        """Open a round of mixed records or of a sum. A repeated call with equal terms changes nothing.

        Raises:
            RelayRefused: the terms are not allowed or differ from those that the round has.
            RelayUnreachable: no answer.
            ProtocolError: the answer is invalid.
        """
        status = parse_round_status(self._call("PUT", round_path(run, number), json=terms.model_dump()), run, number)
        if status.terms != terms:
            raise ProtocolError(
                f"the relay opened round {number} of {run} with other terms than this call asked for: install the same version of ldpfl at "
                "the relay and at the aggregator"
            )
        return status

    def wait(
        self, run: str, number: int, timeout_s: float, *, poll_s: float = 1.0, on_poll: Callable[[float], None] = lambda left_s: None
    ) -> RoundStatus:
        """Wait until the round is released, by the relay's clock, for at most ``timeout_s`` seconds. Ask every ``poll_s`` seconds.

        ``on_poll`` is called after each answer that the round is not released yet, with the seconds left.

        Raises:
            RelayNotReleased: the round was not released in that time; the message says why.
            RelayRefused, RelayUnreachable: as for :meth:`round_status`.
        """
        slept_s, started_at_s = 0.0, self._clock()
        # Requests are retried for longer than timeout_s by one request's time limit, so that the last one has time for its answer.
        retry_policy = LimitedTime(self._patience, self._sleep, self._clock, timeout_s + self._patience.timeout_s)
        while (status := self.round_status(run, number, retry_policy)).state in ("open", "waiting"):
            # The clock counts slow answers as waiting, too. The sum of the pauses ends the wait even if the clock stands still.
            if max(slept_s, self._clock() - started_at_s) >= timeout_s:
                why = (
                    "is still open"
                    if status.state == "open"
                    else f"has {counted(status.uploads or 0, 'upload')} of the {status.terms.min_clients} it waits for"
                )
                raise RelayNotReleased(f"round {number} of {run} {why} after {timeout_s:g} seconds; wait longer or cancel it")
            on_poll(timeout_s - max(slept_s, self._clock() - started_at_s))
            # An open round is asked about again at its deadline, if that is nearer than poll_s.
            to_deadline_s = max(status.seconds_left, 0.01) if status.state == "open" else poll_s  # never 0, which would be a busy loop
            pause_s = min(to_deadline_s, poll_s, timeout_s - slept_s)
            self._sleep(pause_s)
            slept_s += pause_s
        return status

    def pull(self, run: str, number: int, terms: Terms | None = None) -> Iterator[bytes]:
        """Yield the encrypted records of a released round one by one, in the relay's mixed order. One part is in memory at a time.

        This is a generator: nothing is requested or checked before its first iteration. Until :meth:`acknowledge`, each call yields the
        same records in the same order. ``terms``, with which the round was opened, bound the amount of data that is read. Without them,
        the relay's own statement of the terms does.

        Raises:
            RelayRefused: the round is not over yet (status 425), or gone.
            RelayUnreachable: no answer.
            ProtocolError: the records do not fit the terms and the number of uploads, or the round is a sum.
        """
        limits = terms or self.round_status(run, number).terms
        if not isinstance(limits, Terms):
            raise ProtocolError(f"round {number} of {run} is a sum round: call pull_sum instead of pull")
        size = limits.record_bytes
        part = records = 0
        parts, expected = 1, 0  # numbers of parts and of expected records; both are known after the first part
        while part < parts:
            response = self._call("GET", f"{round_path(run, number)}/records", max_bytes=_max_part_bytes(size), params={"part": part})
            if part == 0:
                uploads = self.round_status(run, number).uploads or 0  # after the release, this is the number of uploads that were mixed
                if uploads > limits.max_uploads:
                    raise ProtocolError(
                        f"the relay says that round {number} of {run} has {uploads} uploads, expected at most {limits.max_uploads}"
                    )
                expected = uploads * limits.records_per_upload
                parts = number_in_header(response, PARTS, part_count(expected * size))
            data = response.content
            if len(data) % size:
                raise _wrong_length_error(run, number, part, len(data))
            records += len(data) // size
            if records > expected:
                break  # raises below
            yield from _split_records(data, size)
            part += 1
        if records != expected:
            raise ProtocolError(f"the relay sent {records} records for round {number} of {run}, expected {expected}{_PULL_AGAIN}")

    def pull_sum(self, run: str, number: int, terms: SumTerms) -> tuple[NDArray[np.unsignedinteger], list[bytes]]:
        """Return the sum (dimension,) of all masked vectors of a released round, and the envelopes of these vectors, in mixed order.

        Until :meth:`acknowledge`, each call returns the same. ``terms``, with which the round was opened, bound the amount of data that is
        read.

        Raises:
            RelayRefused: the round is not over yet (status 425), or gone.
            RelayUnreachable: no answer.
            ProtocolError: the sum or the envelopes do not fit the terms and the number of uploads.
        """
        total = zeros(terms.dimension, terms.bits)
        byte_ranges, parts = terms.sum_parts(), 0  # each answer below says how many parts the round has
        for part, byte_range in enumerate(byte_ranges):
            length = byte_range.stop - byte_range.start
            data, parts = self._fetch_part(run, number, part, length, terms)
            if len(data) != length:
                raise _wrong_length_error(run, number, part, len(data))
            total.view(np.uint8)[byte_range] = np.frombuffer(data, np.uint8)
        return total, self._envelopes(run, number, range(len(byte_ranges), parts), terms)

    def _fetch_part(self, run: str, number: int, part: int, max_bytes: int, terms: SumTerms) -> tuple[bytes, int]:
        """Return one part of a sum round, of up to ``max_bytes`` bytes, and how many parts the round has."""
        # The sum's parts come first, then the parts with the envelopes.
        response = self._call("GET", f"{round_path(run, number)}/records", max_bytes=max_bytes, params={"part": part})
        return response.content, number_in_header(response, PARTS, len(terms.sum_parts()) + part_count(terms.max_uploads * ENVELOPE_BYTES))

    def _envelopes(self, run: str, number: int, parts: range, terms: SumTerms) -> list[bytes]:
        """Return the envelopes in the given parts of a sum round; raise if their number is not the round's number of uploads."""
        envelopes: list[bytes] = []
        max_bytes = min(terms.max_uploads * ENVELOPE_BYTES, _max_part_bytes(ENVELOPE_BYTES))  # of one part
        for part in parts:
            data, _ = self._fetch_part(run, number, part, max_bytes, terms)
            if len(data) % ENVELOPE_BYTES:
                raise _wrong_length_error(run, number, part, len(data))
            envelopes += _split_records(data, ENVELOPE_BYTES)
            if len(envelopes) > terms.max_uploads:
                break  # raises below, because the number of uploads is lower
        uploads = self.round_status(run, number).uploads or 0  # of the released round
        if not terms.min_clients <= uploads <= terms.max_uploads:
            expected = f"expected {terms.min_clients} to {terms.max_uploads}"
            raise ProtocolError(f"the relay says that round {number} of {run} has {uploads} uploads, {expected}{_PULL_AGAIN}")
        if len(envelopes) != uploads:
            raise ProtocolError(f"round {number} of {run} has {len(envelopes)} envelopes for {uploads} uploads{_PULL_AGAIN}")
        return envelopes

    def acknowledge(self, run: str, number: int) -> None:
        """Tell the relay that the round's records or sum were received. The relay deletes them. A repeated call changes nothing.

        Raises:
            RelayRefused: the round was not released, or is another aggregator's.
            RelayUnreachable: no answer.
        """
        self._call("DELETE", f"{round_path(run, number)}/records")

    def cancel(self, run: str, number: int) -> None:
        """Cancel a round, whatever its state: the relay deletes everything that it holds of the round.

        Raises:
            RelayRefused: there is no such round, or it is another aggregator's.
            RelayUnreachable: no answer.
        """
        self._call("DELETE", round_path(run, number))


_PULL_AGAIN = "; nothing was acknowledged, so the round can be pulled again"


def _wrong_length_error(run: str, number: int, part: int, length: int) -> ProtocolError:
    return ProtocolError(f"part {part} of round {number} of {run} has {length} bytes, which its terms do not allow{_PULL_AGAIN}")


def _split_records(data: bytes, size: int) -> Iterator[bytes]:
    """Yield the records of ``size`` bytes that lie in ``data`` one after the other."""
    return (data[start : start + size] for start in range(0, len(data), size))


def _max_part_bytes(record_bytes: int) -> int:
    """Return a limit for the bytes of a part, so that a faulty relay cannot fill this process's memory.

    The relay puts each record of a round into a random part, and sends the round part by part. So a part's number of records is binomial.
    Its mean m is at most PART_BYTES / record_bytes, for rounds up to 256 GiB. More than 4 m + 64 records have a probability below 1e-60,
    whatever m is. The 64 is for large records, of which m is small.
    """
    return 4 * PART_BYTES + 64 * record_bytes


def _is_wrong_offset(response: httpx.Response) -> bool:
    """Whether the relay expected other bytes of the upload than those that it was sent."""
    return response.status_code == 409 and OFFSET in response.headers


def _stored_bytes(response: httpx.Response, blob: bytes) -> int:
    """Return how many bytes of ``blob`` the relay has, according to its response."""
    return number_in_header(response, OFFSET, len(blob))
