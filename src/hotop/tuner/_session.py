"""``hotop.tuning()``: calls inside it are measured; what was found is kept and shared."""

from __future__ import annotations

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
        self._seen: set[tuple[str, bytes]] = set()
        self._unsaved: dict[torch.device, _store.Table] = {}
        self._saved_at = time.monotonic()

    def tune(self, tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure the call's key unless its choice is known."""
        found = tunable._describe(args, kwargs)
        if found is None or _is_capturing(found[1]):
            return
        description, device = found
        words = tunable._encode(description, device.index)
        if (tunable.name, words) in self._seen:
            return
        self._seen.add((tunable.name, words))
        known = None if self.retune else self._known(tunable, description, device)
        if known is not None:
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
        choice = table.find(tunable.name, tunable.signature, description)
        return choice if choice is not None and choice.tactic in tunable.tactics else None

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
            path = self.path or _store.default_path(device)
            try:
                _store.save(table, path)
            except (OSError, _store.BrokenTable) as error:
                warnings.warn(
                    f"{path}: tuned choices cannot be kept ({error}); they hold in this process",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def call(tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Serve one call inside ``tuning()``: measure first, then answer with the default tactic.

    All ranks of a distributed program answer alike, whatever each has measured so far.
    """
    with _lock:
        session = _session
        if session is not None:
            # A tactic that calls another tunable is timed as it will run.
            _switches.set_timing_tactics(True)
            try:
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
    block, and kept in the device's file, also when the block is left by an exception.

    With ``torch.distributed`` up, all ranks of ``group`` must enter and leave the block together;
    at its end they agree on one choice per key (see :func:`agree`), and one rank per machine
    writes the file.

    Args:
        path: The file; None: :func:`hotop.tuner.default_path` of each Tensor's device.
        retune: Measure also what the file knows.
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
    with _lock:
        if _session is not None:
            raise RuntimeError("hotop.tuning() is open already")
        session = Session(
            Path(path) if path is not None else None,
            _profile.Effort(warmup, rounds, batch_us),
            retune,
            Progress(progress),
            _distributed.writes_files(),
        )
        _session = session
        _switches.set_tuning(True)
    try:
        yield
    finally:
        with _lock:
            _session = None
            _switches.set_tuning(False)
        session.progress.close()
        try:
            _share(session, group)
        finally:
            session.save()


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
