"""What watchers conclude from beats and failures, without processes; test_faults.py has those."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from autopar import AutoparError, AutoparWarning
from autopar.errors import InputError
from autopar.runtime.ranks.faults import attempts
from autopar.runtime.ranks.faults.attempts import attempt_number
from autopar.runtime.ranks.faults.failure import Failure, LostRankError, Position
from autopar.runtime.ranks.faults.heartbeats import ANOTHER_BACKWARD
from autopar.runtime.ranks.faults.raised_calls import RaisedCalls
from autopar.runtime.ranks.faults.watcher import TIMEOUT, TIMEOUT_VARIABLE, Watcher, timeout_given
from autopar.schedule.clock import Phase


def watchers(n: int, timeout: float = 5.0) -> list[Watcher]:
    """Of all ranks, whose threads do not run."""
    store = dist.HashStore()
    return [Watcher(rank, n, store, -1, timeout, lambda: True) for rank in range(n)]


class SlowStore:
    """A store whose calls by other threads than its maker last until `may_answer`."""

    def __init__(self) -> None:
        self._store, self._caller = dist.HashStore(), threading.current_thread()
        self.is_called, self.may_answer = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if threading.current_thread() is not self._caller:
                self.is_called.set()
                self.may_answer.wait(30)
            return getattr(self._store, name)(*arguments)

        return call


@pytest.mark.slow
@pytest.mark.parametrize("stops_itself", [False, True])
def test_no_thread_is_in_a_call_of_the_store_once_the_watcher_has_stopped(stops_itself: bool) -> None:
    """Python aborts a process whose daemon threads come back from C++ while the interpreter ends."""
    store = SlowStore()
    watcher = Watcher(0, 2, store, -1, 60.0, lambda: not stops_itself)
    watcher.start()
    assert store.is_called.wait(30)
    threading.Timer(3.0, store.may_answer.set).start()
    watcher.stop()
    assert not [thread for thread in watcher._threads if thread.is_alive()]


def test_the_first_failure_counts_and_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = watchers(2)
    with second.call("train_step"):
        second.doing(Phase.BACKWARD, 1, 3)
        second.failed(ValueError("wrong"))
    text = "rank 1 failed in the backward of stage 1, micro-batch 3 (call 1, train_step): ValueError: wrong"
    assert str(first.failed(KeyError("later"))) == text
    assert capfd.readouterr().err == f"autopar: {text}; all ranks end\n"


def test_a_broken_connection_is_the_failure_of_its_other_end() -> None:
    first, second = watchers(2)
    second.heartbeats.beat(second.position)
    with first.call("train_step"):
        error = first.lost(LostRankError(1, "rank 0 waited: Connection closed by peer", ("backward", 1, 2)))
    assert isinstance(error, AutoparError)
    assert "rank 1 failed in the backward of stage 1, micro-batch 2 (call 1, train_step): its process ended" in str(
        error
    )
    assert second.heartbeats.known() == first.heartbeats.known()


@pytest.mark.slow
def test_threads_that_lose_connections_together_look_once_for_the_rank_that_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The caller's, and one that saves."""
    first, *others = watchers(3)
    for one in others:
        one.heartbeats.beat(one.position)
    lost = RuntimeError("Connection closed by peer")
    with first.call("train_step"), ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: str(first.lost(lost)), range(2)))
    assert found[0] == found[1]
    said = capfd.readouterr().err
    assert said.count("looks for the rank that ended") == said.count("all ranks end") == 1


class LosableStore:
    """A store that may be gone, with the process that has it."""

    def __init__(self) -> None:
        self._store, self.is_gone = dist.HashStore(), False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.is_gone:
                raise RuntimeError("Connection reset by peer")
            return getattr(self._store, name)(*arguments)

        return call


def test_where_the_rank_with_the_store_ended_is_what_this_rank_heard_last() -> None:
    """Nothing is claimed where it heard nothing: rank 2 listens to rank 1."""
    store = LosableStore()
    first, second, third = (Watcher(rank, 3, store, 0, 5.0, lambda: True) for rank in range(3))
    with first.call("train_step"):
        first.doing(Phase.FORWARD, 0, 1)
        for one in (first, second, third):
            one.heartbeats.beat(one.position)
        second.heartbeats.listen(0.5)
        third.heartbeats.listen(0.5)
    store.is_gone = True
    errors = []
    for one in (second, third):
        with one.call("train_step"):
            errors.append(str(one.lost(RuntimeError("Connection closed by peer"))))
    cause = "its process ended: killed, or crashed (Connection closed by peer)"
    place = "in the forward of stage 0, micro-batch 1 (call 1, train_step)"
    assert errors == [
        f"rank 0 failed, last heard of {place}: {cause}; rank 1 was waiting for it in call 1, train_step",
        f"rank 0 failed: {cause}; rank 2 was waiting for it in call 1, train_step",
    ]


def test_a_rank_that_ended_is_named_with_how_its_script_ended() -> None:
    first, second, _ = ranks = watchers(3)
    with first.call("train_step"):
        pass
    with pytest.raises(ValueError, match="caught"), first.call("save"):
        raise ValueError("caught")
    for one in ranks:
        one.heartbeats.beat(one.position)
    first.stop()
    with second.call("train_step"), second.call("backward"):
        message = str(second.lost(LostRankError(0, "it waited: Connection closed by peer")))
    ended = "its script had ended after call 2, which raised ValueError: caught (it waited: Connection closed by peer)"
    assert message == f"rank 0 failed: {ended}; rank 1 was waiting for it in call 1, train_step"


def test_a_place_that_a_rank_has_left_since_is_not_claimed() -> None:
    first, second = watchers(2)
    with first.call("train_step"):
        first.heartbeats.beat(first.position)
    with second.call("train_step"):
        pass
    with second.call("train_step"):
        message = str(second.lost(LostRankError(0, "it waited: Connection closed by peer")))
    cause = "its process ended: killed, or crashed (it waited: Connection closed by peer)"
    assert message == f"rank 0 failed: {cause}; rank 1 was waiting for it in call 2, train_step"


def test_an_error_has_the_place_where_it_was_raised() -> None:
    """Not that of an error before it, which Python has freed since: the new one may have its address."""
    one = watchers(1)[0]
    for _ in range(20):
        with contextlib.suppress(ValueError), one.call("load"):
            raise ValueError("caught")
        errors = [ValueError("of the script") for _ in range(20)]
        for error in errors:
            one.heartbeats.failure = None
            one.failed(error)
            assert one.heartbeats.failure is not None
            assert one.heartbeats.failure.position.what == ""


def test_a_rank_without_beats_fails_after_the_timeout() -> None:
    ranks = watchers(3)
    for one in ranks:
        one.heartbeats.beat(one.position)
    for _ in range(7):
        ranks[1].heartbeats.beat(ranks[1].position)
        ranks[0].heartbeats.listen(1.0)  # to rank 2, which is silent
        ranks[2].heartbeats.listen(1.0)  # to rank 1
    assert ranks[2].heartbeats.known() == Failure(
        2,
        "no sign of life for 5 s: it is stopped, or its machine cannot be reached",
        Position(),
        0,
        is_last_beat=True,
    )


def listened(ranks: list[Watcher], seconds: int) -> Failure | None:
    """What is known after ranks have gone on beating."""
    for _ in range(seconds):
        for one in ranks:
            one.heartbeats.beat(one.position, one._n_raised)
        for one in ranks:
            one.heartbeats.listen(1.0)
    return ranks[0].heartbeats.known()


def test_ranks_that_stay_in_different_calls_end() -> None:
    ranks = watchers(3)
    for one in ranks:
        with one.call("train_step"):
            pass
    with ranks[0].call("save"), ranks[1].call("train_step"):
        assert listened(ranks, 10) is None
        found = listened(ranks, 3)
    assert str(found) == (
        "rank 1 failed in call 2, train_step: rank 0 is in another call 2, save, and both wait: every rank must make "
        "the same calls in the same order"
    )


@pytest.mark.parametrize("again", [0, 1])
def test_a_rank_that_goes_back_again_alone_is_the_one_that_failed(again: int) -> None:
    """Whichever rank notices."""
    ranks = watchers(2)
    with ranks[again].call(ANOTHER_BACKWARD), ranks[1 - again].call("forward"):
        found = listened(ranks, 13)
    assert str(found) == (
        f"rank {again} failed in call 1, another backward of the same outputs: rank {1 - again} is in another call 1, "
        "forward, and both wait: every rank must make the same calls in the same order"
    )


def test_ranks_in_the_same_call_or_one_behind_the_other_may_take_long() -> None:
    first, second = ranks = watchers(2)
    with first.call("train_step"), second.call("train_step"), first.call("backward"):
        assert listened(ranks, 20) is None
    with first.call("save"):
        assert listened(ranks, 20) is None  # the other one computes between calls
        with second.call("save"):
            pass
        with second.call("train_step"):  # the first has not left the call that both made
            assert listened(ranks, 20) is None


def test_calls_that_raised_on_one_rank_do_not_make_ranks_differ() -> None:
    first, second = ranks = watchers(2)
    with pytest.raises(ValueError, match="caught"), first.call("load"):
        raise ValueError("caught")
    with second.call("save"):
        pass
    with first.call("save"), second.call("train_step"):  # the first has not left the call that both made
        assert listened(ranks, 20) is None
    with first.call("train_step"):
        pass
    with pytest.raises(ValueError, match="caught"), second.call("load"):
        raise ValueError("caught")
    with first.call("save"), second.call("train_step"):
        assert listened(ranks, 13) is not None


def test_different_calls_for_a_moment_end_nothing() -> None:
    """Beats are taken while calls begin and end."""
    first, second = ranks = watchers(2)
    for _ in range(4):
        with first.call("save"), second.call("train_step"):
            assert listened(ranks, 8) is None
        assert listened(ranks, 1) is None


def test_a_rank_that_ended_in_good_order_is_not_missed() -> None:
    ranks = watchers(3)
    for one in ranks:
        one.heartbeats.beat(one.position)
    ranks[2].heartbeats.end(Position())
    for _ in range(20):
        ranks[1].heartbeats.beat(ranks[1].position)
        ranks[0].heartbeats.listen(1.0)  # to rank 1, in the place of rank 2
    assert ranks[0].heartbeats.known() is None
    for _ in range(7):
        ranks[0].heartbeats.listen(1.0)
    assert ranks[0].heartbeats.known().rank == 1  # type: ignore[union-attr]


def test_a_call_that_raises_on_some_ranks_only_is_the_last() -> None:
    store = dist.HashStore()
    ranks = [RaisedCalls(store, 2, 0.1) for _ in range(2)]
    for number in range(2):
        for one in ranks:
            one.begin()
            one.wait_for_others()
        for one in ranks[: 2 - number]:
            with pytest.raises(ValueError, match="caught"), one.together():
                raise ValueError("caught")
        if number == 0:
            for one in ranks:
                one.wait_for_others()
    with pytest.raises(AutoparError, match="raised an error on 1 of 2 ranks, this one among them"):
        ranks[0].wait_for_others()
    ranks[1].wait_for_others()


def test_every_attempt_has_a_number_of_its_own() -> None:
    """Also if ranks of an attempt before said hello and then ended."""
    store, found = dist.HashStore(), []
    for attempt in range(3):
        store.set("hello/2", f"a process of attempt {attempt} that has ended")
        with ThreadPoolExecutor(3) as ranks:
            numbers = list(ranks.map(lambda rank: attempt_number(store, rank, 3, 20.0), range(3)))
        assert len(set(numbers)) == 1
        found.append(numbers[0])
    assert len(set(found)) == 3


def test_an_error_that_ends_the_script_failed_in_the_call_that_raised_it() -> None:
    first, second = watchers(2)
    error = ValueError("wrong")
    with pytest.raises(ValueError, match="wrong"), first.call("train_step"):
        raise error
    first.script_failed(error)
    assert str(second.heartbeats.known()) == "rank 0 failed in call 1, train_step: ValueError: wrong"


def test_an_error_is_not_hidden_by_a_store_that_is_gone() -> None:
    store = LosableStore()
    calls = RaisedCalls(store, 2, 0.1)
    calls.begin()
    store.is_gone = True
    with pytest.raises(ValueError, match="what happened"), calls.together():
        raise ValueError("what happened")


@pytest.mark.parametrize(("rank", "who"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_a_rank_that_does_not_start_is_named(rank: int, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "timeout_given", lambda: 0.02)
    with (
        pytest.warns(AutoparWarning, match=f"{who} has not joined after 0 s: every rank must call parallelize without"),
        pytest.raises(AutoparError, match=f"{who} never joined, .* a rank that passes devices= runs by itself"),
    ):
        attempt_number(dist.HashStore(), rank, 3, 0.2)


def test_the_timeout_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout_given() == TIMEOUT
    monkeypatch.setenv(TIMEOUT_VARIABLE, "60")
    assert timeout_given() == 60
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(InputError, match=f"{TIMEOUT_VARIABLE}='soon': give seconds"):
        timeout_given()


def test_a_rank_that_lives_and_makes_no_call_is_named_once() -> None:
    first, second = watchers(2)
    for watcher in (first, second):
        with watcher.call("train_step"):
            pass
    said = []
    with first.call("train_step"):
        for _ in range(12):
            for watcher in (first, second):
                watcher.heartbeats.beat(watcher.position)
            said += [first.heartbeats.listen(1.0), second.heartbeats.listen(1.0)]
    (message,) = filter(None, said)
    assert message.startswith(
        "rank 0 has been in call 2, train_step for 5 s: rank 1 is alive, and has made no call since call 1."
    )
    assert first.heartbeats.failure is None
    with second.call("train_step"):
        for _ in range(3):
            for watcher in (first, second):
                watcher.heartbeats.beat(watcher.position)
            assert first.heartbeats.listen(1.0) == second.heartbeats.listen(1.0) == ""
