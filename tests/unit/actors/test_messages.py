"""Descriptors come out of their bytes as they went in."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.actors.io_counters import IoCounters
from polyneuron.actors.messages import (
    ExecutorStatus,
    Message,
    PlaceExecutor,
    RequestOutcome,
    SubmitRequest,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
COUNTERS = st.builds(IoCounters, *[st.integers(0, 2**63)] * len(IoCounters._fields))
SAMPLING = st.dictionaries(st.text(), st.integers(-1, 2**64 - 1) | FLOATS | st.none() | st.text())

MESSAGES = {
    SubmitRequest: st.builds(
        SubmitRequest, request_id=INT32, mailbox=INT32, prompt=st.lists(INT32), max_tokens=INT32,
        sampling=SAMPLING, end_ids=st.lists(INT32), top_logprobs=INT32,
        hash_logits=st.booleans(), score_from=INT32, score_answer=st.booleans(),
    ),
    RequestOutcome: st.builds(
        RequestOutcome, request_id=INT32, finish_reason=st.text(), num_prompt=INT32,
        prefill_ns=INT32, token_ns=st.lists(st.integers(0, 2**63)), outside_ns=INT32,
        logits_sha256=st.none() | st.text(), scores=st.lists(FLOATS), error=st.none() | st.text(),
        top_logprobs=st.lists(st.lists(st.tuples(INT32, FLOATS))),
        prefill_io=COUNTERS, decode_io=COUNTERS, miss_rates=st.lists(FLOATS),
        batch_sizes=st.lists(st.tuples(INT32, INT32)),
    ),
    PlaceExecutor: st.builds(PlaceExecutor, executor=INT32, unit=INT32, cores=st.lists(INT32)),
    ExecutorStatus: st.builds(
        ExecutorStatus, executor=INT32, pid=INT32, generation=INT32, isa=st.text(),
        cores=st.lists(INT32),
    ),
}  # fmt: skip


class TestMessages:
    @pytest.mark.parametrize("kind", MESSAGES)
    def test_bytes_give_the_same_message(self, kind: type[Message]) -> None:
        @settings(max_examples=30)
        @given(message=MESSAGES[kind])
        def check(message: Message) -> None:
            again = kind.unpack(message.pack())
            for item in fields(kind):
                assert getattr(again, item.name) == getattr(message, item.name)

        check()

    def test_every_message_is_tested(self) -> None:
        # A class with slots is made twice, and both are listed.
        names = {kind.__name__ for kind in Message.__subclasses__()}
        assert {kind.__name__ for kind in MESSAGES} == names

    def test_integer_keys_survive(self) -> None:
        """msgpack refuses them unless told otherwise."""
        sampling: dict[Any, float] = {7: 0.5}
        request = SubmitRequest(1, 0, [], 0, sampling=sampling)
        assert SubmitRequest.unpack(request.pack()).sampling == sampling

    def test_missing_field_is_refused(self) -> None:
        with pytest.raises(TypeError):
            PlaceExecutor.unpack(b"\x92\x01\x02")
