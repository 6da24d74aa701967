"""Hostile files and places: deep, huge, foreign, unreadable, linked, directories, no home."""

import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

import hotop
from hotop.__main__ import main
from hotop.tuner import BrokenTable, _devices, _store, tuning
from tuner_cases import make, tagged

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("own_tuner_files")


def document(**changes):
    entry = {
        "key": [4, "float32[2]@cpu", "int 1", 'str "a,b"', "None"],
        "tactic": "fast",
        "median_us": 1.0,
        "default_us": None,
        "versions": _store.versions(""),
        "tried": {"fast": 1.0},
        "rejected": {},
        "measured_at": 1.0,
    }
    return {
        "format": "hotop-tuner",
        "version": 2,
        "device": _devices.describe(CPU),
        "ops": {"t::hostile": {"signature": "s", "choices": [{**entry, **changes}]}},
    }


def place(text):
    path = hotop.tuner.default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


HOSTILE = {
    "deep": "[" * 200_000,
    "deep key": json.dumps(document()).replace('"int 1"', "[" * 990 + "]" * 990),
    "huge int": json.dumps(document()).replace("[4,", "[" + "9" * 5000 + ","),
    **{
        f"{field}={value}": json.dumps(document(**{field: value}))
        for field, value in [
            ("median_us", float("nan")),
            ("median_us", -1),
            ("measured_at", float("inf")),
            ("measured_at", True),
            ("default_us", "x"),
            ("tried", []),
            ("tried", {"fast": "x"}),
            ("rejected", [1]),
            ("rejected", {"slow": 1}),
            ("tactic", None),
            ("key", []),
            ("versions", {"torch": 2}),
            ("versions", []),
            ("extra", 1),
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_break_no_call(name, capsys):
    path = place(HOSTILE[name])
    f, slow = make("t::hostile", tactics={"fast": tagged("fast")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(torch.ones(2))
    assert slow.calls == 1
    assert len(caught) == 1
    assert len(str(caught[0].message)) < 1000
    if name != "deep key":
        assert main(["tuner", "show", str(path)]) == 1
        assert capsys.readouterr().err.startswith("hotop tuner: ")


def test_duplicate_choices_and_parts_keep_the_later():
    one, two = document()["ops"]["t::hostile"]["choices"][0], document(measured_at=2.0, tactic="x")
    text = document()
    text["ops"]["t::hostile"]["choices"] = [two["ops"]["t::hostile"]["choices"][0], one]
    table = _store.read(place(json.dumps(text)))
    assert [c.tactic for c in table.choices_of("t::hostile", "s", _store.versions(""))] == ["x"]


def test_directory_in_the_place_of_a_file_stays(tmp_path, capsys):
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    f, _ = make("t::hostile", tactics={"fast": tagged("fast")})
    with pytest.warns(RuntimeWarning), tuning(folder):
        f(torch.ones(2))
    good = place(json.dumps(document()))
    for target in (folder, Path("/")):
        assert main(["tuner", "merge", str(target), str(good)]) == 1
        assert main(["tuner", "clear", str(target)]) == 1
    assert "Is a directory" in capsys.readouterr().err
    assert (folder / "inside").is_dir()
    assert not list(tmp_path.glob("folder*.*"))


@pytest.mark.filterwarnings("ignore:.*so calls take their default")
def test_file_that_cannot_be_read_is_not_put_aside(monkeypatch):
    path = place(json.dumps(document()))
    real_open = Path.open

    def refuse(self, *args, **kwargs):
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return real_open(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    f, _ = make("t::hostile", tactics={"fast": tagged("fast")})
    with pytest.warns(RuntimeWarning, match="cannot be kept"), tuning():
        f(torch.ones(2))
    monkeypatch.undo()
    assert json.loads(path.read_text()) == document()


def test_place_that_cannot_be_asked_about(monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    f, slow = make("t::hostile")
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        f(torch.ones(2))
    assert slow.calls == 1


def test_user_without_a_home(monkeypatch):
    for name in ("HOTOP_TUNER_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    f, slow = make("t::hostile", tactics={"fast": tagged("fast")})
    with pytest.warns(RuntimeWarning, match="set HOTOP_TUNER_DIR"):
        f(torch.ones(2))
    assert slow.calls == 1
    with pytest.warns(RuntimeWarning, match="they hold in this process"), tuning():
        f(torch.ones(2))
    f(torch.ones(2))
    assert f.hits == 1


def test_link_stays_a_link(tmp_path):
    target = place(json.dumps(document()))
    link = tmp_path / "link.json"
    link.symlink_to(target)
    assert len(_store.save(_store.read(target), link).ops) == 1
    assert link.is_symlink()
    assert _store.clear_file(link) == 1
    assert link.is_symlink()
    assert not _store.read(target).ops


def test_crash_before_the_rename_leaves_the_old_file(monkeypatch):
    path = place(json.dumps(document()))

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        _store.clear_file(path)
    assert json.loads(path.read_text()) == document()
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".lock"]


def test_command_leaves_foreign_files_alone(tmp_path, capsys):
    good, foreign = place(json.dumps(document())), tmp_path / "notes.txt"
    foreign.write_text("my notes")
    assert main(["tuner", "merge", str(foreign), str(good)]) == 1
    assert "not JSON" in capsys.readouterr().err
    assert foreign.read_text() == "my notes"
    missing = tmp_path / "typo" / "file.json"
    assert main(["tuner", "clear", str(missing)]) == 1
    assert not missing.parent.exists()


def test_show_prints_keys_that_make_no_sense(capsys):
    odd = [1, {"x": 2}, {"allowed": [3]}, [[4]], 5]
    assert main(["tuner", "show", str(place(json.dumps(document(key=odd))))]) == 0
    assert re.search(r"3 \[\[4\]\] 5: fast 1.00 us", capsys.readouterr().out)


def test_device_type_that_pytorch_does_not_know():
    text = document()
    text["device"] = {"type": "tpu9", "name": "x"}
    with pytest.raises(BrokenTable, match="not a device of this process"):
        hotop.tuner.load(place(json.dumps(text)))
