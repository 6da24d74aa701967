"""``python -m hotop tuner``: show, merge and clear files of tuned choices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hotop.tuner import _store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print the choices of a file")
    show.add_argument("file", type=Path, nargs="?", help="default: the file of this machine's CPU")
    merge = actions.add_parser("merge", help="add the choices of other files to FILE")
    merge.add_argument("file", type=Path, help="is made if it does not exist")
    merge.add_argument("others", type=Path, nargs="+", metavar="OTHER")
    clear = actions.add_parser("clear", help="drop the choices of FILE")
    clear.add_argument("file", type=Path)
    clear.add_argument("--op", action="append", default=[], help="only those of this tunable")


def run(arguments: argparse.Namespace) -> int:
    """Run the action; 1 when a file cannot be used."""
    try:
        return int({"show": _show, "merge": _merge, "clear": _clear}[arguments.action](arguments))
    except (_store.BrokenTable, OSError) as error:
        print(f"hotop tuner: {error}", file=sys.stderr)
        return 1


def _show(arguments: argparse.Namespace) -> int:
    path = arguments.file or _store.default_path("cpu")
    table = _store.read(path)
    print(f"{path}: {table.device['name']}")
    for name, op in table.ops.items():
        print(f"{name}: {len(op['choices'])} choices")
        for choice in op["choices"].values():
            usual = f", default {choice.default_us:.2f} us" if choice.default_us else ""
            print(f"  {_readable(choice.key)}: {choice.tactic} {choice.median_us:.2f} us{usual}")
            for tactic, problem in choice.rejected.items():
                print(f"    {tactic} is out: {problem}")
    return 0


def _readable(key: list[object]) -> str:
    return " ".join(
        ",".join(map(str, part.get("allowed", ()))) if isinstance(part, dict) else str(part)
        for part in key[1:]
    )


def _merge(arguments: argparse.Namespace) -> int:
    tables = [_store.read(path) for path in arguments.others]
    for path, table in zip(arguments.others, tables, strict=True):
        if table.device != tables[0].device:
            raise _store.BrokenTable(
                f"{path}: made for {table.device['name']!r}, not {tables[0].device['name']!r}"
            )
    if arguments.file.exists():
        _store.read(arguments.file)  # what is named here is not put aside when it is foreign
    merged = tables[0]
    for table in tables:
        merged = _store.save(table, arguments.file)
    count = sum(len(op["choices"]) for op in merged.ops.values())
    print(f"{arguments.file}: {count} choices")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    gone = _store.clear_file(arguments.file, arguments.op)
    print(f"{arguments.file}: {gone} choices dropped")
    return 0
