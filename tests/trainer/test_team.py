"""Ranks in step: one result or one error for all, and how their parts become a version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, Fenced, InvalidRequest, OutcomeUnknown, StitchError, Unavailable
from stitch.core.ids import Digest, StateDigest
from stitch.core.manifest import Codec, Kind, StoredFile, TensorSpec
from stitch.trainer import comms as comms_module
from stitch.trainer.comms import SingleProcess, TorchComms
from stitch.trainer.parts import Content, Part, Ready, Receipts, Share, agreed, files_of, merged
from stitch.trainer.team import Outcome, Team, outcome_of
from stitch.weights.encode import LocalFile
from tests.trainer.threads import Meeting, ThreadComms, at_all

pytestmark = pytest.mark.unit

SIZE = 3


async def total(values: list[int]) -> int:
    return sum(values)


async def refuse(values: list[int]) -> int:
    raise Fenced("another writer")


async def break_down(values: list[int]) -> int:
    raise ZeroDivisionError("by rank 0")


def round_of(act: Callable[[int], int], decide: Any) -> list[Any]:
    """One round in which rank n brings act(n)."""

    def one(comms: ThreadComms) -> int:
        return asyncio.run(Team(comms).decide(outcome_of(lambda: act(comms.rank)), decide))

    return at_all(SIZE, one)


def failing(rank: int, error: Exception) -> Callable[[int], int]:
    def act(mine: int) -> int:
        if mine == rank:
            raise error
        return mine

    return act


def test_every_rank_gets_what_rank_0_made_of_all() -> None:
    assert round_of(lambda rank: rank + 1, total) == [6, 6, 6]


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("error", [InvalidRequest("number: -1", field="number"), Unavailable("store"), CorruptObject("x")])
def test_the_error_of_one_rank_is_raised_by_all(rank: int, error: StitchError) -> None:
    told = round_of(failing(rank, error), total)
    assert {type(each) for each in told} == {type(error)}
    assert {str(each) for each in told} == {f"rank {rank}: {error}"}
    assert {getattr(each, "field", None) for each in told} == {getattr(error, "field", None)}
    assert told[rank].__cause__ is error


def test_of_several_errors_the_first_ranks_is_told() -> None:
    told = round_of(lambda rank: 1 // 0 if rank else rank, total)
    assert {str(each) for each in told} == {"rank 1: ZeroDivisionError: integer division or modulo by zero"}
    assert {type(each) for each in told} == {StitchError}


@pytest.mark.parametrize(("decide", "words"), [(refuse, "another writer"), (break_down, "rank 0: ZeroDivisionError: by rank 0")])
def test_what_rank_0_decides_against_is_raised_by_all(decide: Any, words: str) -> None:
    told = round_of(lambda rank: rank, decide)
    assert {str(each) for each in told} == {words}
    assert len({type(each) for each in told}) == 1


def test_a_single_process_raises_what_it_met() -> None:
    team = Team(SingleProcess())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(team.decide(outcome_of(lambda: 1 // 0), total))
    assert asyncio.run(team.decide(Outcome(value=4), total)) == 4


def test_a_value_that_may_not_be_sent_is_that_ranks_error() -> None:
    class Small(ThreadComms):
        def gather(self, value: Any) -> Any:
            if value == 2:
                raise InvalidRequest("comms: too large")
            return super().gather(value)

    meeting = Meeting(SIZE)

    def one(comms: ThreadComms) -> int:
        return asyncio.run(Team(Small(meeting, comms.rank)).decide(Outcome(value=comms.rank), total))

    told = at_all(SIZE, one)
    assert {str(each) for each in told} == {"rank 2: comms: too large"}


def test_a_lost_rank_puts_the_others_out_of_step_for_good() -> None:
    def one(comms: ThreadComms) -> str:
        team = Team(comms)
        comms._meeting.barrier.abort()
        with pytest.raises(OutcomeUnknown):
            asyncio.run(team.decide(Outcome(value=1), total, lost=OutcomeUnknown))
        with pytest.raises(Unavailable, match="out of step"):
            asyncio.run(team.decide(Outcome(value=1), total))
        return "told"

    assert at_all(SIZE, one) == ["told"] * SIZE


def test_ranks_need_torch_distributed_set_up() -> None:
    with pytest.raises(InvalidRequest, match="call init_process_group first") as refused:
        TorchComms()
    assert refused.value.field == "comms"


def test_a_message_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comms_module, "MAX_MESSAGE_BYTES", 100)
    assert comms_module._bounded("short") == "short"
    with pytest.raises(InvalidRequest, match="at most 100 are sent"):
        comms_module._bounded("x" * 200)


# --- parts -------------------------------------------------------------------------------------------------------------------


def spec(name: str, state: str = "0" * 16) -> TensorSpec:
    return TensorSpec(name=name, dtype="F32", shape=(100,), state=StateDigest(state))


def part(*names: str, kind: Kind = Kind.DELTA, codec: Codec = Codec.SPARSE, size: int = 1, **form: Any) -> Part:
    given: dict[str, Any] = {"complete": False, "again": True, **form}
    return Part(tensors=tuple(map(spec, names)), kind=kind, codec=codec, size=size, **given)


def test_parts_are_one_version_whoever_gave_which_tensor() -> None:
    one = merged([part("a", "c"), part("b")], wanted=map(spec, "abc"), strict=False)
    other = merged([part("b", "c"), part(), part("a")], wanted=(), strict=False)
    assert one == other
    assert [tensor.name for tensor in one.tensors] == ["a", "b", "c"]


def test_a_tensor_of_two_ranks_and_one_of_none_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="'b' is given by rank 0 and by rank 2"):
        merged([part("a", "b"), part("c"), part("b")], wanted=(), strict=False)
    with pytest.raises(InvalidRequest, match="'b' of the base is not given"):
        merged([part("a"), part("c")], wanted=map(spec, "abc"), strict=False)


@pytest.mark.parametrize(
    ("parts", "strict", "full"),
    [
        ([part("a", size=300), part("b", size=700)], False, True),
        ([part("a", size=300), part("b", size=700)], True, False),
        ([part("a", size=300), part("b", size=700, again=False)], False, False),
        ([part("a", size=300), part("b", size=400)], False, False),
        ([part("a", size=900), part("b", size=200)], False, True),
    ],
)
def test_a_delta_no_smaller_than_a_full_version_is_not_worth_it(parts: list[Part], strict: bool, full: bool) -> None:
    assert merged(parts, wanted=(), strict=strict).worth_full == full


def test_a_delta_of_all_tensors_whole_is_a_full_version() -> None:
    whole = [part(name, codec=Codec.CHANGED_TENSORS, complete=True) for name in "ab"]
    assert merged(whole, wanted=(), strict=False).kind is Kind.FULL
    assert merged(whole, wanted=(), strict=True).kind is Kind.DELTA
    some = [whole[0], part("b", codec=Codec.CHANGED_TENSORS)]
    assert merged(some, wanted=(), strict=False).kind is Kind.DELTA


def test_files_of_all_ranks_get_names_of_their_own() -> None:
    content = Content(kind=Kind.DELTA, codec=Codec.SPARSE, tensors=(), weights_digest=Digest(""), worth_full=False)
    told = [Receipts(weights=tuple(stored("delta.safetensors", key) for key in keys), files=()) for keys in ("a", "bc", "")]
    found = files_of(content, told, None)
    assert [(file.path, file.key) for file in found.weights] == [
        (f"delta-0000{n + 1}-of-00003.safetensors", "abc"[n]) for n in range(3)
    ]


def stored(path: str, key: str, size: int = 3) -> StoredFile:
    return StoredFile(path=path, key=key, size=size, blake3=Digest(""))


def test_receipts_are_held_against_the_directory(tmp_path: Path) -> None:
    content = Content(kind=Kind.FULL, codec=Codec.SAFETENSORS, tensors=(), weights_digest=Digest(""), worth_full=False)
    directory = [LocalFile(path=name, source=tmp_path / name) for name in ("a", "b")]
    for file in directory:
        file.source.write_bytes(b"123")

    def receipts(*files: StoredFile) -> list[Receipts]:
        return [Receipts(weights=(file,), files=()) for file in files]

    a, b = stored("a", "1"), stored("b", "2")
    assert files_of(content, receipts(b, a), directory).weights == (a, b)
    for wrong, words in (
        (receipts(a), "no rank uploaded it"),
        (receipts(a, stored("b", "2", size=4)), "4 bytes of it were uploaded"),
        (receipts(a, b, stored("c", "3")), "is not in rank 0's directory"),
    ):
        with pytest.raises(CorruptObject, match=words):
            files_of(content, wrong, directory)


def test_ranks_must_be_asked_for_the_same() -> None:
    first = Ready(number=None, kind=None, directory=False, against=None, held=(), doubted=False)
    other = Ready(number=None, kind=Kind.FULL, directory=False, against=None, held=(), doubted=True)
    assert agreed([first, first]) is first
    with pytest.raises(InvalidRequest, match="kind: full at rank 1, None at rank 0") as refused:
        agreed([first, other])
    assert refused.value.field == "kind"


@given(sizes=st.dictionaries(st.text(max_size=5), st.integers(0, 10**9), max_size=40), size=st.integers(1, 8), seed=st.randoms())
def test_shares_are_disjoint_whole_even_and_the_same_for_all(sizes: dict[str, int], size: int, seed: Any) -> None:
    rows = list(sizes.items())
    shares = []
    for rank in range(size):
        seed.shuffle(rows)
        shares.append(Share(rank=rank, size=size).names(rows))
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
