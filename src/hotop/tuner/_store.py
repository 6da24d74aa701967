"""The files of tuned choices: one per device, locked, written whole, merged, never trusted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hotop.tuner import _devices
from hotop.tuner._say import say

FORMAT = "hotop-tuner"
VERSION = 2


class BrokenTable(Exception):
    """A file of tuned choices that cannot be used, and why."""


class ForeignTable(BrokenTable):
    """A file that is whole, but not one of this version of hotop's tuner: not ours to replace."""


@dataclass(frozen=True)
class Choice:
    """The tactic that won for one key.

    Attributes:
        key: The call's description; see ``_key``.
        tactic: The winner's name.
        median_us: Its median time, microseconds.
        default_us: The default tactic's median time, or None where it may not serve.
        versions: Of torch, hotop and the op's author; see :func:`versions`.
        tried: Median time of each tactic that was measured, microseconds, by name.
        rejected: Why others were not: by name.
        measured_at: When, seconds since 1970 (UTC).
    """

    key: list[Any]
    tactic: str
    median_us: float
    default_us: float | None
    versions: dict[str, str]
    tried: dict[str, float]
    rejected: dict[str, str]
    measured_at: float


def versions(of_tactics: str) -> dict[str, str]:
    """Return what a choice that is measured now is good for."""
    return {"torch": torch.__version__, "hotop": _hotop_version(), "tactics": of_tactics}


@functools.cache
def _hotop_version() -> str:
    try:
        return importlib.metadata.version("hotop")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@dataclass
class Table:
    """One file's contents: choices by tunable and key."""

    device: dict[str, str]
    path: Path | None = None
    ops: dict[str, dict[str, Any]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)

    def choices_of(self, name: str, signature: str, versions: dict[str, str]) -> list[Choice]:
        """Return a tunable's choices, none when its parameters, rules or versions changed."""
        op = self.ops.get(name)
        if op is None:
            return []
        if op["signature"] != signature:
            self.report(f"the choices of {name} were made for other parameters or bucket rules")
            return []
        found = [choice for choice in op["choices"].values() if choice.versions == versions]
        if op["choices"] and not found:
            other = next(iter(op["choices"].values())).versions
            changed = [
                f"{what} {other.get(what) or None}, not {versions[what] or None}"
                for what in versions
                if other.get(what) != versions[what]
            ]
            self.report(f"the choices of {name} were measured with {'; '.join(changed)}")
        return found

    def find(
        self, name: str, signature: str, versions: dict[str, str], key: list[Any]
    ) -> Choice | None:
        """Return the choice for one key."""
        op = self.ops.get(name)
        if op is None or op["signature"] != signature:
            return None
        found: Choice | None = op["choices"].get(_place(key, versions))
        return found

    def add(self, name: str, signature: str, choice: Choice) -> None:
        """Add a choice; of two for one key and the same versions the later one stays."""
        op = self.ops.get(name)
        if op is None or op["signature"] != signature:
            op = self.ops[name] = {"signature": signature, "choices": {}}
        place = _place(choice.key, choice.versions)
        old = op["choices"].get(place)
        if old is None or _rank(choice) >= _rank(old):
            op["choices"][place] = choice

    def merge(self, other: Table) -> None:
        """Add all choices of another table; the op's later signature stays."""
        for name, theirs in other.ops.items():
            ours = self.ops.get(name)
            if ours is not None and ours["signature"] != theirs["signature"]:
                newest = [
                    max(map(_rank, op["choices"].values()), default=(0.0, ""))
                    for op in (ours, theirs)
                ]
                if newest[0] >= newest[1]:
                    continue
            for choice in theirs["choices"].values():
                self.add(name, theirs["signature"], choice)

    def check_device(self) -> torch.device:
        """Return the device that the table is for.

        Raises:
            BrokenTable: It is not one of this machine's.
        """
        with contextlib.suppress(RuntimeError):  # a type that this PyTorch does not know
            for device in _devices.of_type(self.device["type"]):
                if _devices.describe(device) == self.device:
                    return device
        raise BrokenTable(
            f"{self.path}: made for {self.device['name']!r}, which is not a device of this process"
        )

    def report(self, problem: str) -> None:
        """Say once that a part of the file is ignored."""
        if problem not in self._reported:
            self._reported.add(problem)
            say(f"{self.path}: {problem}; ignored")

    def to_json(self) -> str:
        ops = {
            name: {
                "signature": op["signature"],
                "choices": [asdict(op["choices"][key]) for key in sorted(op["choices"])],
            }
            for name, op in sorted(self.ops.items())
        }
        document = {"format": FORMAT, "version": VERSION, "device": self.device, "ops": ops}
        return json.dumps(document, indent=1) + "\n"


def _place(key: list[Any], versions: dict[str, str]) -> str:
    return json.dumps([key, versions], sort_keys=True)


def _rank(choice: Choice) -> tuple[float, str]:
    return choice.measured_at, choice.tactic


def directory() -> Path:
    """Return where files lie: ``$HOTOP_TUNER_DIR``, or the user's cache directory.

    Raises:
        FileNotFoundError: Neither is set, and the user has no home.
    """
    given = os.environ.get("HOTOP_TUNER_DIR")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "hotop" / "tuner"
    except RuntimeError:
        raise FileNotFoundError("there is no home directory; set HOTOP_TUNER_DIR") from None


def default_path(device: torch.device | str = "cpu") -> Path:
    """Return the file for a device of this machine."""
    described = _devices.describe(torch.device(device))
    slug = re.sub(r"[^a-z0-9]+", "-", described["name"].lower()).strip("-")
    return directory() / f"{described['type']}-{slug}.json"


def read(path: Path) -> Table:
    """Read a file.

    Raises:
        BrokenTable: It cannot be read, or is not a table of this version.
    """
    try:
        _refuse_special(path)
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise BrokenTable(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenTable(f"{path}: not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ForeignTable(f"{path}: not a table of hotop's tuner")
    if document.get("version") != VERSION:
        raise ForeignTable(
            f"{path}: of version {document.get('version')!r}; this hotop reads version {VERSION}"
        )
    try:
        device = document["device"]
        table = Table({"type": str(device["type"]), "name": str(device["name"])}, path)
        for name, op in document["ops"].items():
            if not isinstance(op["signature"], str):
                raise TypeError("signature")
            table.ops[name] = {"signature": op["signature"], "choices": {}}
            for entry in op["choices"]:
                table.add(name, op["signature"], _checked(Choice(**entry)))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise BrokenTable(f"{path}: a part is missing or wrong ({error!r:.300})") from None
    return table


def _checked(choice: Choice) -> Choice:
    times = [choice.median_us, choice.measured_at, *choice.tried.values()]
    if choice.default_us is not None:
        times.append(choice.default_us)
    if not (
        isinstance(choice.key, list)
        and choice.key
        and type(choice.key[0]) is int
        and isinstance(choice.tactic, str)
        and all(type(time) in (int, float) and 0 <= time < math.inf for time in times)
        and all(isinstance(text, str) for text in choice.rejected.values())
        and all(isinstance(text, str) for text in choice.versions.values())
    ):
        raise ValueError(f"bad choice {choice}")
    return choice


def _refuse_special(path: Path) -> None:
    """Raise OSError for what is there and no file: opening a fifo would wait for its other end."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "neither a file nor absent", str(path))


# None: there is no place for files.
_tables: dict[Path | None, Table | None] = {}


def read_default(device: torch.device) -> Table | None:
    """Return the table of a device of this machine, read once; a broken one is reported."""
    try:
        path = default_path(device)
    except OSError as error:
        if None not in _tables:
            _tables[None] = None
            say(f"no tuned choices: {error}")
        return None
    return usable(path, device)


def usable(path: Path, device: torch.device) -> Table | None:
    """Return a file's table, read once, if there is one and it is for this device."""
    if path not in _tables:
        _tables[path] = _read_usable(path, device)
    return _tables[path]


def forget() -> None:
    """Read the files again when they are next needed."""
    _tables.clear()


def _read_usable(path: Path, device: torch.device) -> Table | None:
    try:
        if not path.exists():
            return None
        table = read(path)
        if table.device != _devices.describe(device):
            raise BrokenTable(f"{path}: made for {table.device['name']!r}")
    except (BrokenTable, OSError) as error:
        say(f"{error}; ignored, so calls take their default")
        return None
    return table


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".lock")
    _refuse_special(beside)
    with beside.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing is not enough where a process was forked meanwhile.
            fcntl.flock(lock, fcntl.LOCK_UN)


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, suffix=".part", delete=False
    ) as part:
        try:
            part.write(text)
            part.flush()
            os.fsync(part.fileno())
            Path(part.name).chmod(0o644)
            os.replace(part.name, path)  # noqa: PTH105
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def save(table: Table, path: Path) -> Table:
    """Merge a table into a file, under its lock; a broken file is put aside.

    Returns:
        What the file holds now.

    Raises:
        BrokenTable: The file is for another device, of another version, or not a table.
        OSError: It cannot be read or written, or is a directory.
    """
    given, path = path, Path(os.path.realpath(path))  # a link stays one
    _refuse_special(path)
    with _locked(path):
        merged = Table(table.device, path)
        if path.exists():
            with path.open("rb"):  # what cannot be opened is not broken
                pass
            try:
                merged = read(path)
            except ForeignTable:
                raise
            except BrokenTable as error:
                aside = path.with_name(path.name + ".broken")
                path.replace(aside)
                say(f"{error}; moved to {aside.name}")
            if merged.device != table.device:
                raise BrokenTable(
                    f"{path}: made for {merged.device['name']!r}, not {table.device['name']!r}"
                )
        merged.merge(table)
        write_whole(path, merged.to_json())
    _tables.pop(given, None)
    _tables.pop(path, None)
    return merged


def clear_file(path: Path, ops: Iterable[str] = ()) -> int:
    """Drop the choices of a file, or of some of its tunables; return how many went.

    Raises:
        BrokenTable: It cannot be read.
    """
    read(path)  # before a lock file is made beside it
    path = Path(os.path.realpath(path))
    with _locked(path):
        table = read(path)
        names = set(ops) or set(table.ops)
        gone = sum(len(table.ops.pop(name)["choices"]) for name in names if name in table.ops)
        write_whole(path, table.to_json())
    return gone
