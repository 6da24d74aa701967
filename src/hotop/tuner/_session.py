"""``hotop.tuning()``: calls inside it are measured; what was found is kept and shared."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotop import _load
from hotop.tuner import _distributed, _profile, _store, _table
from hotop.tuner._progress import Progress

if TYPE_CHECKING:
    from hotop.tuner._tunable import Tunable

_switches: Any = _table if _load.CORE is None else _load.CORE
# Written to disk at most this often, so that an interrupted session loses little.
_SAVE_EVERY_S = 1.0
_session: Session | None = None
_lock = threading.RLock()


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
        self._unsaved: dict[torch.device, _store.Table] = {}
        self._saved_at = time.monotonic()

    def tune(self, tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure the call's key unless its choice is known."""
        found = tunable._describe(args, kwargs)
        if found is None or _is_recorded(found[1]):
            return
        description, device = found
        words = tunable._encode(description, device.index)
        if (tunable, words) in self._seen:
            return
        try:
            self._choose(tunable, args, kwargs, description, device)
        except Exception as error:  # the call itself goes on, and says so if it is at fault
            warnings.warn(
                f"{tunable.name}: not tuned for {description[1:]}: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._seen.add((tunable, words))

    def _choose(
        self,
        tunable: Tunable,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        description: list[Any],
        device: torch.device,
    ) -> None:
        names = set(tunable.candidates(args, kwargs).values())
        known = None if self.retune else self._known(tunable, description, device)
        # A tactic that came after the file must have its chance.
        if known is not None and {known.tactic} <= names <= {*known.tried, *known.rejected}:
            # Among what the ranks agree on.
            self._keep(self.tables, tunable, device, known)
            tunable._learn(description, device, known.tactic)
            return
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
                warnings.warn(
                    f"{tunable.name}: tactic {tactic!r} is out for {description[1:]}: {problem}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if measured.winner is None:
            return
        self._record(tunable, description, device, measured)

    def _known(
        self, tunable: Tunable, description: list[Any], device: torch.device
    ) -> _store.Choice | None:
        if self.path is None:
            table = _store.read_default(device)
        else:
            table = _store.usable(self.path, device)
        if table is None:
            return None
        return table.find(tunable.name, tunable.signature, description)

    def _keep(
        self,
        tables: dict[torch.device, _store.Table],
        tunable: Tunable,
        device: torch.device,
        choice: _store.Choice,
    ) -> None:
        table = tables.setdefault(device, _store.Table(_store.describe_device(device)))
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
            measured.medians,
            measured.rejected,
            time.time(),
        )
        self._keep(self.tables, tunable, device, choice)
        self._keep(self._unsaved, tunable, device, choice)
        tunable._learn(description, device, measured.winner)
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
                warnings.warn(
                    f"tuned choices cannot be kept ({error}); they hold in this process",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _is_recorded(device: torch.device) -> bool:
    """Return whether what runs now is recorded by a trace, a mode or a CUDA graph."""
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def call(tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Serve one call inside ``tuning()``: measure first, then answer with the default tactic.

    All ranks of a distributed program answer alike, whatever each has measured so far.
    """
    with _lock:
        session = _session
        if session is not None:
            try:
                # A tactic that calls another tunable is timed as it will run.
                _switches.set_timing_tactics(True)
                session.tune(tunable, args, kwargs)
            finally:
                _switches.set_timing_tactics(False)
    names = list(tunable.candidates(args, kwargs).values())
    return tunable.tactics[names[0]].function(*args, **kwargs)


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
    reference, then all are timed in turn, on the sizes that stand for the bucket. The results of
    the calls themselves come from the default tactic. What was found is used by calls after the
    block, and kept in the device's file, also when the block is left by an exception. A key that
    cannot be measured is reported and left to the default. Calls that are traced, captured in a
    CUDA graph or seen by a dispatch mode, and calls of forked processes, are not measured. While
    one thread measures, calls of others wait.

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
                with _lock:  # another thread may still measure
                    session.progress.close()
                _share(session, group)
            finally:
                session.save()


def _leave_in_child() -> None:
    """A forked process has no session, and no thread that would give the lock back."""
    global _session, _lock
    _session = None
    _lock = threading.RLock()
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

    for tunable in living().values():
        if only:
            tunable._mark_loaded(device)
        tunable._learn_all(table, device)
