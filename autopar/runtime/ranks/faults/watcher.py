"""Ends a rank when another one has failed, and says which one, where and why.

A wait inside gloo cannot be interrupted: a rank whose partner is gone, or stopped, would wait until gloo's timeout of
half an hour. So every rank has two threads beside the one that computes:

```
   rank 0   talk:  every 0.5 s ..... writes a beat, reads its left neighbour's, looks for a failure   heartbeats.py
            judge: every 0.1 s ..... prints and ends the process once a failure is known
```
A rank that fails writes the failure itself. One that was killed is noticed by the ranks that wait for it, as a broken
connection; those on its machine see which process is gone (processes.py). One that is stopped, or whose machine is
gone, is noticed by its right neighbour, after `timeout` without a new beat.
Ranks that wait for each other in different calls see that in their beats, too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from autopar.capture import torch_private_ranks
from autopar.errors import AutoparError, InputError
from autopar.runtime.ranks.faults.clock import Clock
from autopar.runtime.ranks.faults.failure import (
    UNKNOWN,
    Failure,
    LostRankError,
    Position,
    described,
    is_lost_connection,
    names,
)
from autopar.runtime.ranks.faults.heartbeats import BEAT, KILLED, Heartbeats, ending_of, has_ended, position_of
from autopar.runtime.ranks.faults.raised_calls import RaisedCalls
from autopar.runtime.ranks.one_message import is_on_all_ranks
from autopar.runtime.step.error_context import PHASE_NAMES
from autopar.schedule.clock import Phase

log = logging.getLogger(__name__)

TIMEOUT = 120.0  # s
TIMEOUT_VARIABLE = "AUTOPAR_RANK_TIMEOUT"

_WHERE = "position_on_rank"  # attribute of an error that a call has raised: where
_LOOK = 0.1  # s between two looks of the judge
_LAST_WORDS = 0.3  # s for a rank that fails in the same way to say so itself
_LEAVE = 10.0  # s for a rank that has failed to clean up and end by itself
_ENDING = 0.1  # s at most from the end of a connection to that of its process, before torchrun ends all others
_REACT = 2.0  # s for the caller's thread to raise KeyboardInterrupt
_LAST_CALL = 15.0  # s at most for a call of the store that a thread is in when the watcher stops
_TAIL = 5.0  # s that a call may still take after the store's host has ended: it may have finished its own part


def timeout_given() -> float:
    """Seconds without a sign of life after which a rank counts as failed. Raises InputError for what is no number."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds >= 2 * BEAT:
        raise InputError(f"{TIMEOUT_VARIABLE}={text!r}: give seconds, at least {2 * BEAT:g}")
    return seconds


_watcher: Watcher | None = None  # of this process


def watch(rank: int, size: int) -> Watcher:
    """Watch the ranks of the default process group, as one of them. Raises InputError for a wrong timeout."""
    global _watcher
    timeout, group = timeout_given(), dist.group.WORLD
    default = torch_private_ranks.default_store()
    if _watcher is None:
        _watch_uncaught_errors()
        atexit.register(lambda: _watcher.stop() if _watcher is not None else None)
    else:
        _watcher.stop()  # of a process group that has ended
    base = default
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    of_rank = isinstance(base, dist.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    _watcher = Watcher(
        rank,
        size,
        dist.PrefixStore("autopar/watcher", default.clone()),
        0 if of_rank else -1,
        timeout,
        lambda: dist.is_initialized() and dist.group.WORLD is group,
    )
    _watcher.start()
    return _watcher


@contextlib.contextmanager
def watched(what: str) -> Iterator[None]:
    """As a decorator: a function that needs other ranks, if there are any, counts as a call."""
    with contextlib.nullcontext() if _watcher is None else _watcher.call(what):
        yield


def lost(error: BaseException) -> BaseException:
    """What to raise in the place of an error outside of the caller's thread: AutoparError for a broken connection."""
    if _watcher is None or _watcher.stopped or not is_lost_connection(error):
        return error
    return _watcher.lost(error)


def _watch_uncaught_errors() -> None:
    """An error that ends the script ends all ranks: they would wait for this one."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if _watcher is not None and not is_on_all_ranks(error):
            _watcher.script_failed(error)
        before(kind, error, trace)

    sys.excepthook = hook


class Watcher:
    """Of one rank. Nothing here is collective."""

    def __init__(
        self, rank: int, size: int, store: Any, store_rank: int, timeout: float, is_current: Callable[[], bool]
    ) -> None:
        """`store`: of this object alone, with its own connection. `store_rank`: of the process that has the store; -1:
        none of the ranks. `is_current()`: whether the process group of the ranks still exists; the watcher stops with
        it."""
        self.rank, self.size, self.timeout = rank, size, timeout
        self.heartbeats = Heartbeats(rank, size, store, timeout)
        self._is_current, self._process = is_current, os.getpid()
        self.raised_calls = RaisedCalls(store, size, timeout)
        self._n_calls, self._inside, self._doing = 0, "", (Phase.FORWARD, -1, -1)
        self._n_raised = 0  # of the calls
        self._last_error = ""  # that the last call raised, if it did
        self._own = threading.Event()  # this rank failed by itself, and is about to end
        # Of the thread that finds out what failed: one that saves may lose its connection together with the caller's.
        self._finding = threading.RLock()
        self._stopped = threading.Event()
        self._n_looks = 0
        self._store_lost = False
        self._store_rank = store_rank
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True) for work in (self._talk, self._judge)
        ]

    # -- what this rank is doing ----------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        phase, stage, microbatch = self._doing
        if not self._inside or stage < 0:
            return Position(self._n_calls, self._inside)
        return Position(self._n_calls, self._inside, PHASE_NAMES[phase], stage, microbatch)

    def doing(self, phase: Phase, stage: int, microbatch: int) -> None:
        """An action begins."""
        self._doing = (phase, stage, microbatch)

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """A call that all ranks make. Raises AutoparError in the place of gloo's error if it loses one."""
        outer, self._doing = self._inside, (Phase.FORWARD, -1, -1)
        if not outer:
            _listen_to_signals()
            self._n_calls += 1
            self._inside = what
        last_error = ""
        try:
            with self.naming_lost():
                yield
        except BaseException as error:
            error.__dict__.setdefault(_WHERE, self.position)  # of the innermost call
            last_error = described(error)
            raise
        finally:
            if not outer:
                self._n_raised += last_error != ""
                self._last_error = last_error
            self._inside = outer
            self._doing = (Phase.FORWARD, -1, -1)

    @contextlib.contextmanager
    def naming_lost(self) -> Iterator[None]:
        """Inside, a connection that is lost raises AutoparError with the rank, in the place of gloo's error."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise self.lost(error) from None

    # -- failing --------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> Failure:
        """Record that this rank failed, or that it lost another one, and print it once. Returns the job's first
        failure."""
        with self._finding:
            if isinstance(error, LostRankError):
                failure = self._lost([error.rank], error.cause, error.due)
            elif is_lost_connection(error):
                failure = self._lost([r for r in range(self.size) if r != self.rank], described(error))
            else:
                failure = Failure(self.rank, described(error), error.__dict__.get(_WHERE, self.position), self.rank)
            first = self.heartbeats.record(failure)
            if first.noticed_by == self.rank and not self._own.is_set():
                _say(f"{first}; all ranks end")
            self._own.set()
        return first

    def lost(self, error: BaseException) -> BaseException:
        """What to raise in the place of `error`, after `failed`: AutoparError for a broken connection, which says what
        gloo or NCCL said, so that the error itself need not be shown."""
        failure = self.failed(error)
        if isinstance(error, LostRankError) or is_lost_connection(error):
            log.debug("rank %d lost a connection", self.rank, exc_info=error)
            return AutoparError(f"{failure}; rank {self.rank} was waiting for it {self.position}")
        return error

    def script_failed(self, error: BaseException) -> None:
        """An error ends the script of this rank, in a call or outside."""
        if not (self._stopped.is_set() or self._own.is_set()) and os.getpid() == self._process:
            self.failed(error)

    def _lost(self, candidates: Sequence[int], cause: str, due: tuple[str, int, int] | None = None) -> Failure:
        """The failure of one of `candidates`, whose connection broke. A rank that failed by itself has said so before
        its connections closed."""
        found = self.heartbeats.known()
        if found is not None:
            return found
        silent = list(candidates)
        if self._store_rank in silent and not self.heartbeats.store_answers():
            silent = [self._store_rank]
        if len(silent) > 1:
            silent = self._ended(silent)
        if len(silent) > 1:
            _say(f"rank {self.rank} lost a connection {self.position}, and looks for the rank that ended")
            before = self.heartbeats.of(silent)
            time.sleep(2.5 * BEAT)
            after = self.heartbeats.of(silent)
            silent = [r for r in silent if before.get(r) == after.get(r)] if after else []
            found = self.heartbeats.known()
            if found is not None:
                return found
        if len(silent) != 1:
            who = names(silent) + " ended" if silent else "a connection broke"
            return Failure(-1, f"{who} ({cause})", self.position, self.rank)
        (rank,) = silent
        last, own = self.heartbeats.last(rank), self.position
        how = ending_of(last) if has_ended(last) else KILLED
        if due is not None:
            return Failure(rank, f"{how} ({cause})", Position(own.call, own.what, *due), self.rank)
        heard = position_of(last)
        if has_ended(last) or not last or heard.call != own.call:  # of a call that it has left since
            return Failure(rank, f"{how} ({cause})", UNKNOWN, self.rank)
        return Failure(rank, f"{how} ({cause})", heard, self.rank, is_last_beat=True)

    def _ended(self, candidates: Sequence[int]) -> list[int]:
        """The one of them whose process on this machine has ended; all of them where that is not to be seen."""
        until = time.monotonic() + _ENDING
        while not (gone := self.heartbeats.gone(candidates)) and time.monotonic() < until:
            time.sleep(_ENDING / 20)
        return gone if len(gone) == 1 else list(candidates)

    def went_well(self) -> bool:
        """Whether no call has raised here, and no failure of any rank is known."""
        return not (self._own.is_set() or self._n_raised or self.heartbeats.known() is not None)

    @property
    def has_store(self) -> bool:
        """Whether the store of the ranks ends with this process."""
        return self._store_rank == self.rank

    # -- threads --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.heartbeats.beat(self.position, self._n_raised)
        _listen_to_signals()
        for thread in self._threads:
            thread.start()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """This rank ends in good order, or its process group does. Returns once the threads have ended, whoever stopped
        them: Python aborts the process where a thread comes back from a call of the store while the interpreter
        ends."""
        if os.getpid() != self._process:
            return
        if not self._stopped.is_set():
            self._stopped.set()
            self._keep_store()
            with contextlib.suppress(RuntimeError):
                if not self._store_lost:
                    self.heartbeats.end(self.position, self._last_error)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(_LAST_CALL)

    def _talk(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(BEAT):
            if not self._is_current():
                self.stop()
                return
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * BEAT), now  # at most: this rank itself may have been stopped
            try:
                self.heartbeats.beat(self.position, self._n_raised)
                self.heartbeats.known()
                if (late := self.heartbeats.listen(elapsed)) != "":
                    _say(late)
            except RuntimeError:
                self._store_lost = True
                return
            self._n_looks += 1

    def _judge(self) -> None:
        """End the process where the caller's thread cannot."""
        last, waited, n_looks = time.monotonic(), 0.0, 0
        failing, interrupted, leaving = Clock(), Clock(), Clock()
        while not self._stopped.wait(_LOOK):
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * _LOOK), now
            waited, n_looks = (waited + elapsed if n_looks == self._n_looks else 0.0), self._n_looks
            if self._own.is_set() and failing.passed(_LEAVE):
                self._end(f"rank {self.rank} did not end by itself within {_LEAVE:g} s of its failure")
            if self.heartbeats.failure is not None and not self._own.is_set() and failing.passed(_LAST_WORDS):
                self._end(f"{self.heartbeats.failure}; rank {self.rank} ends, too, {self.position}")
            if self._store_lost:
                if not self._inside:
                    leaving.reset()
                elif leaving.passed(_TAIL, self._n_calls):
                    self._end(f"{self._store} is gone; {self._ends()}")
            elif waited > self.timeout:
                silent = f"{self._store} has not answered for {self.timeout:g} s"
                self._end(f"{silent}: it is stopped, or its machine cannot be reached; {self._ends()}")
            if self._was_interrupted():
                interrupted.begin(self._n_calls)
            if interrupted.running:
                if not self._inside or self._own.is_set():
                    interrupted.reset()
                elif interrupted.passed(_REACT, self._n_calls):
                    self.heartbeats.record(Failure(self.rank, "KeyboardInterrupt", self.position, self.rank))
                    self._end(f"{self.heartbeats.failure}; all ranks end", 130)

    @property
    def _store(self) -> str:
        """For messages: the process that has the store of all ranks."""
        if self._store_rank >= 0:
            return f"rank {self._store_rank} failed: its process"
        return "the process with the store of torch.distributed (torchrun's, of rank 0's machine)"

    def _ends(self) -> str:
        return f"rank {self.rank} ends {self.position}"

    def _end(self, text: str, code: int = 1) -> None:
        _say(text)
        self._keep_store()
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # its lock may be held by a thread that waits
        flush.start()
        flush.join(1.0)
        os._exit(code)

    def _keep_store(self) -> None:
        """Until all ranks have seen the failure, if the store ends with this process."""
        if self.heartbeats.failure is not None and self._store_rank == self.rank:
            time.sleep(2 * BEAT)

    # -- Ctrl-C ---------------------------------------------------------------------------------------------------

    def _was_interrupted(self) -> bool:
        if _signals is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        with contextlib.suppress(BlockingIOError):
            return signal.SIGINT in _signals[0].recv(4096)
        return False


_signals: tuple[socket.socket, socket.socket] | None = None  # ours, Python's; open as long as the process lives


def _listen_to_signals() -> None:
    """Get a byte for every signal: Python raises KeyboardInterrupt in the main thread, once that is out of gloo.

    At every call, as a loop of asyncio that handled signals and has ended leaves Python without anyone to tell.
    """
    global _signals
    if threading.current_thread() is not threading.main_thread():
        return
    if _signals is None:
        _signals = socket.socketpair()
        for end in _signals:
            end.setblocking(False)
    before = signal.set_wakeup_fd(_signals[1].fileno(), warn_on_full_buffer=False)
    if before not in (-1, _signals[1].fileno()):  # another library has it
        signal.set_wakeup_fd(before)


def _say(text: str) -> None:
    """At once, in one piece, whatever holds Python's own streams."""
    with contextlib.suppress(OSError):
        os.write(2, f"autopar: {text}\n".encode())
