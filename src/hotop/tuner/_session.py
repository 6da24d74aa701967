"""``hotop.tuning()``: calls inside it are measured; what was found is kept and shared."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotop import _load
from hotop.tuner import _devices, _distributed, _profile, _store, _table
from hotop.tuner._call import Refused
from hotop.tuner._key import Malformed, NotKeyable
from hotop.tuner._progress import Progress
from hotop.tuner._say import say, words_of

if TYPE_CHECKING:
    from hotop.tuner._tunable import Tunable

_switches: Any = _table if _load.CORE is None else _load.CORE
# Written to disk at most this often, so that an interrupted session loses little.
_SAVE_EVERY_S = 1.0
# A key whose data prove nothing is looked at again in later calls, this often at most.
_MOST_ATTEMPTS = 3
_session: Session | None = None
_lock = threading.Lock()  # of _session, while a block opens
# Who measures a key now: {"turn": (thread, one object per call)}. A dict takes and gives it in one
# step, so that no interrupt leaves it taken, as one behind Lock.acquire() could.
_measuring: dict[str, tuple[int, object]] = {}


class Session:
    """An open ``tuning()`` block."""

    def __init__(
        self,
        path: Path | None,
        effort: _profile.Effort,
        retune: bool,
        progress: Progress,
        writes: bool,
    ) -> None:
        self.path = path
        self.effort = effort
        self.retune = retune
        self.progress = progress
        self.writes = writes
        self.tables: dict[torch.device, _store.Table] = {}
        self._seen: set[tuple[Tunable, bytes]] = set()
        self._attempts: Counter[tuple[Tunable, bytes]] = Counter()
        self._told: set[tuple[Tunable, str]] = set()
        self._unsaved: dict[torch.device, _store.Table] = {}
        self._saved_at = time.monotonic()

    def tune(self, tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure the call's key unless its choice is known."""
        try:
            description, device = tunable._key_of(args, kwargs)
            words = tunable._key_words(args, kwargs)
            if words is None:
                raise NotKeyable("its key is too long")
            _refuse_recorded(device)
        except Malformed:
            return
        except NotKeyable as error:
            self._tell(tunable, f"{tunable.name}: a call is not tuned: {error}")
            return
        key = (tunable, words)
        if key in self._seen:
            return
        try:
            is_settled = self._choose(tunable, args, kwargs, description, device)
        except (Exception, Refused) as error:  # the call itself goes on, and says what is at fault
            is_settled = True
            why = str(error) if isinstance(error, NotKeyable | Refused) else words_of(error)
            say(f"{tunable.name}: not tuned for {description[1:]}: {why}")
        self._attempts[key] += 1
        if is_settled or self._attempts[key] >= _MOST_ATTEMPTS:
            self._seen.add(key)

    def _tell(self, tunable: Tunable, text: str) -> None:
        if (tunable, text) not in self._told:
            self._told.add((tunable, text))
            say(text)

    def _choose(
        self,
        tunable: Tunable,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        description: list[Any],
        device: torch.device,
    ) -> bool:
        """Find the key's choice; False: other data of the same key may still do."""
        names = set(tunable.candidates(args, kwargs).values())
        known = None if self.retune else self._known(tunable, description, device)
        # A tactic that came after the file must have its chance.
        if known is not None and {known.tactic} <= names <= {*known.tried, *known.rejected}:
            # Among what the ranks agree on.
            self._keep(self.tables, tunable, device, known)
            tunable._learn(description, device, known.tactic, applies=True)
            return True
        measured = _profile.measure(
            tunable,
            args,
            kwargs,
            self.effort,
            lambda tactic: self.progress.show(tunable.name, description, tactic),
        )
        self.progress.count()
        for tactic, problem in measured.rejected.items():
            if not problem.startswith("raises NotImplementedError"):
                self._tell(
                    tunable,
                    f"{tunable.name}: tactic {tactic!r} is out for {description[1:]}: {problem}",
                )
        if measured.unproven is not None:
            self._tell(
                tunable,
                f"{tunable.name}: no tactic may win for {description[1:]}: {measured.unproven}",
            )
            return False
        if measured.winner is not None:
            self._record(tunable, description, device, measured)
        return True

    def _known(
        self, tunable: Tunable, description: list[Any], device: torch.device
    ) -> _store.Choice | None:
        if self.path is None:
            table = _store.read_default(device)
        else:
            table = _store.usable(self.path, device)
        if table is None:
            return None
        return table.find(tunable.name, tunable.signature, tunable._versions(), description)

    def _keep(
        self,
        tables: dict[torch.device, _store.Table],
        tunable: Tunable,
        device: torch.device,
        choice: _store.Choice,
    ) -> None:
        table = tables.setdefault(device, _store.Table(_devices.describe(device)))
        table.add(tunable.name, tunable.signature, choice)

    def _record(
        self,
        tunable: Tunable,
        description: list[Any],
        device: torch.device,
        measured: _profile.Measured,
    ) -> None:
        assert measured.winner is not None
        default = next(iter(tunable.tactics))
        choice = _store.Choice(
            description,
            measured.winner,
            measured.medians.get(measured.winner, 0.0),
            measured.medians.get(default),
            tunable._versions(),
            measured.medians,
            measured.rejected,
            time.time(),
        )
        self._keep(self.tables, tunable, device, choice)
        self._keep(self._unsaved, tunable, device, choice)
        tunable._learn(description, device, measured.winner, applies=True)
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Merge what is new into the files."""
        self._saved_at = time.monotonic()
        pending, self._unsaved = self._unsaved, {}
        if not self.writes:
            return
        for device, table in pending.items():
            try:
                _store.save(table, self.path or _store.default_path(device))
            except (OSError, _store.BrokenTable) as error:
                say(f"tuned choices cannot be kept ({error}); they hold in this process")


def _refuse_recorded(device: torch.device) -> None:
    """Raise NotKeyable where what runs now is recorded by a trace, a mode or a CUDA graph."""
    if torch._C._len_torch_dispatch_stack():
        raise NotKeyable("a dispatch mode is active")
    if torch._C._get_tracing_state() is not None:
        raise NotKeyable("it is traced by torch.jit")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotKeyable("a CUDA graph is captured")


def call(tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Serve one call inside ``tuning()``: measure first, then answer with the default tactic.

    All ranks of a distributed program answer alike, whatever each has measured so far. While a key
    is measured, calls of other threads get the default: the tactic may wait for them.
    """
    turn = threading.get_ident(), object()
    try:
        session = _session
        if _measuring.setdefault("turn", turn) is turn and session is not None:
            # A tactic that calls another tunable is timed as it will run.
            _switches.set_timing_tactics(True)
            session.tune(tunable, args, kwargs)
    finally:
        if _measuring.get("turn") is turn:
            _switches.set_timing_tactics(False)
            del _measuring["turn"]
    names = list(tunable.candidates(args, kwargs).values())
    return tunable.tactics[names[0]].function(*args, **kwargs)


def _wait_for_others() -> None:
    """Wait until no other thread measures."""
    while (turn := _measuring.get("turn")) is not None and turn[0] != threading.get_ident():
        time.sleep(0.001)


@contextmanager
def tuning(
    path: str | Path | None = None,
    *,
    retune: bool = False,
    warmup: int = 3,
    rounds: int = 11,
    batch_us: float = 200.0,
    progress: bool | None = None,
    group: Any = None,
) -> Iterator[None]:
    """Measure the tactics of every tunable that is called inside the block, in any thread.

    Each new key is measured once: every tactic that applies and is allowed is compared with the
    reference and the default, then all are timed in turn, on copies of the sizes that stand for
    the bucket. The results of the calls themselves come from the default tactic. What was found is
    used by calls after the block, and kept in the device's file, also when the block is left by an
    exception. A call that cannot be measured is reported once and left to the default. Calls that
    are traced, captured in a CUDA graph or seen by a dispatch mode, and calls of forked processes,
    are not measured. While one thread measures, calls of others get the default.

    With ``torch.distributed`` up, all ranks of ``group`` must enter and leave the block together;
    at its end they agree on one choice per key (see :func:`agree`), and one rank per machine
    writes the file.

    Args:
        path: The file, for Tensors of one device; None: :func:`hotop.tuner.default_path` of each
            Tensor's device.
        retune: Measure also what the file knows. (A key is measured again anyway when a tactic
            that can serve it was not tried.)
        warmup: Calls before a tactic's first measured one.
        rounds: Measured batches of each tactic; the median counts.
        batch_us: Microseconds that a batch lasts about.
        progress: Show a progress line on stderr (needs rich); None: on a terminal, when it takes
            long.
        group: The process group that agrees; None: the default one.

    Raises:
        RuntimeError: A block is open already.
        ValueError: ``warmup``, ``rounds`` or ``batch_us`` is not positive.
    """
    global _session
    if warmup < 1 or rounds < 1 or not batch_us > 0:
        raise ValueError("warmup, rounds and batch_us must be positive")
    session = Session(
        Path(path) if path is not None else None,
        _profile.Effort(warmup, rounds, batch_us),
        retune,
        Progress(progress),
        _distributed.writes_files(),
    )
    try:
        with _lock:
            if _session is not None:
                raise RuntimeError("hotop.tuning() is open already")
            _session = session
        _switches.set_tuning(True)
        yield
    finally:
        if _session is session:
            # Before anything that waits, so that a second Ctrl-C leaves no block open.
            _session = None
            _switches.set_tuning(False)
            try:
                _wait_for_others()
                session.progress.close()
                _share(session, group)
            finally:
                session.save()


def _leave_in_child() -> None:
    """A forked process has no session, and no thread that would give the lock back."""
    global _session, _lock
    _session = None
    _lock = threading.Lock()
    _measuring.clear()
    _switches.set_tuning(False)
    _switches.set_timing_tactics(False)


os.register_at_fork(after_in_child=_leave_in_child)


def _share(session: Session, group: Any) -> None:
    if not _distributed.is_up():
        return
    for device, table in _distributed.agreed(session.tables, group).items():
        session._unsaved[device] = table
        _learn(table, device)


def agree(group: Any = None) -> None:
    """Make all ranks use the same choices: of two for one key, the one measured last.

    Call it on every rank after each has read its own machine's file; :func:`tuning` calls it for
    what was measured inside it. Ranks without ``torch.distributed`` are left alone.

    Args:
        group: The process group; None: the default one.
    """
    from hotop.tuner._tunable import clear

    if not _distributed.is_up():
        return
    tables = {}
    for device in _distributed.local_devices():
        table = _store.read_default(device)
        if table is not None:
            tables[device] = table
    agreed = _distributed.agreed(tables, group)
    clear()
    for device, table in agreed.items():
        _learn(table, device, only=True)


def _learn(table: _store.Table, device: torch.device, only: bool = False) -> None:
    from hotop.tuner._tunable import living

    for tunable in living():
        if only:
            tunable._mark_loaded(device)
        tunable._learn_all(table, device)
