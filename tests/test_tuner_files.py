"""Files of tuned choices: kept, merged, locked, never trusted; the command; agreement of ranks."""

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import hotop
from hotop.__main__ import main
from hotop.tuner import BrokenTable, _devices, _store, stats, tuning
from tuner_cases import make, tagged

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("own_tuner_files")


def choice(n, tactic="fast", at=1.0):
    key = [4, "float32[2]@cpu", f"int {n}", 'str "a,b"', "None"]
    return _store.Choice(key, tactic, 1.0, 2.0, _store.versions(""), {tactic: 1.0}, {}, at)


def table(*choices, name="t::files", signature="s"):
    made = _store.Table(_devices.describe(CPU))
    for one in choices:
        made.add(name, signature, one)
    return made


def tuned(name="t::files"):
    """A tunable with one choice in the file, and forgotten by this process."""
    f, slow = make(name, tactics={"fast": tagged("fast")})
    with tuning(retune=True, rounds=1, batch_us=5):
        f(torch.ones(2))
    f._clear_choices()
    _store.forget()
    return f, slow


def test_next_process_uses_the_file():
    f, _ = tuned()
    assert stats()["t::files"].choices == 0
    f(torch.ones(2))
    assert (f.hits, f.misses) == (1, 0)


def test_known_keys_are_not_measured_again():
    f, _ = tuned()
    path = hotop.tuner.default_path()
    before = path.read_text()
    with tuning():
        f(torch.ones(2))
    assert path.read_text() == before
    with tuning(retune=True):
        f(torch.ones(2))
    assert path.read_text() != before


def test_own_path_and_load(tmp_path):
    f, _ = make("t::files", tactics={"fast": tagged("fast")})
    path = tmp_path / "deep" / "own.json"
    with tuning(path):
        f(torch.ones(2))
    assert not hotop.tuner.default_path().exists()
    f._clear_choices()
    assert hotop.tuner.load(path) == 1
    assert hotop.tuner.load(path) == 1, "taken again"
    f(torch.ones(2))
    assert f.hits == 1
    document = json.loads(path.read_text())
    assert (document["format"], document["version"]) == ("hotop-tuner", 2)
    assert document["device"] == _devices.describe(CPU)


BROKEN = {
    "empty": "",
    "not json": "{",
    "no device": '{"format": "hotop-tuner", "version": 2, "ops": {}}',
    "bad op": '{"format": "hotop-tuner", "version": 2, "device": {"type": "cpu", "name": "x"},'
    ' "ops": {"a": 3}}',
    "bad choice": '{"format": "hotop-tuner", "version": 2, "device": {"type": "cpu", "name": "x"},'
    ' "ops": {"a": {"signature": "", "choices": [{"key": 1}]}}}',
    "bytes": b"\xff\xfe\x00",
}


FOREIGN = {
    "a list": "[]",
    "other": '{"format": "other"}',
    "newer": '{"format": "hotop-tuner", "version": 3}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_left_alone(name):
    path = hotop.tuner.default_path()
    path.parent.mkdir(parents=True)
    path.write_text(FOREIGN[name])
    f, _ = make("t::files", tactics={"fast": tagged("fast")})
    with pytest.warns(RuntimeWarning, match="ignored, so calls take their default"):
        f(torch.ones(2))
    with pytest.warns(RuntimeWarning, match="they hold in this process"), tuning():
        f(torch.ones(2))
    f(torch.ones(2))
    assert f.hits == 1
    assert path.read_text() == FOREIGN[name]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_reported_and_put_aside(name):
    path = hotop.tuner.default_path()
    path.parent.mkdir(parents=True)
    text = BROKEN[name]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    f, slow = make("t::files", tactics={"fast": tagged("fast")})
    with pytest.warns(RuntimeWarning, match="ignored, so calls take their default"):
        f(torch.ones(2))
    assert slow.calls == 1
    with pytest.raises(BrokenTable):
        _store.read(path)
    with pytest.warns(RuntimeWarning, match="moved to"), tuning():
        f(torch.ones(2))
    assert _store.read(path).ops
    aside = path.with_name(path.name + ".broken")
    assert aside.read_bytes() == (text if isinstance(text, bytes) else text.encode())


def test_file_of_another_device(tmp_path):
    other = table(choice(1))
    other.device["name"] = "another machine"
    path = hotop.tuner.default_path()
    path.parent.mkdir(parents=True)
    path.write_text(other.to_json())
    f, _ = make("t::files", tactics={"fast": tagged("fast")})
    with pytest.warns(RuntimeWarning, match="made for 'another machine'"):
        f(torch.ones(2))
    with pytest.raises(BrokenTable, match="not a device of this process"):
        hotop.tuner.load(path)
    with pytest.warns(RuntimeWarning, match="cannot be kept"), tuning():
        f(torch.ones(2))
    assert json.loads(path.read_text())["device"]["name"] == "another machine"


@pytest.mark.parametrize(
    "key",
    [
        [4, "float99[2]@cpu", "int 1", 'str "a"', "None"],
        [4, "float32[2]@nowhere", "int 1", 'str "a"', "None"],
        [4, "float32[2]@cpu", "what", 'str "a"', "None"],
        [4, {"allowed": ["gone"]}],
        [4, {"other": 1}],
        [4, 7],
    ],
)
def test_choices_that_make_no_sense_are_reported(key, tmp_path):
    f, slow = make("t::files", tactics={"fast": tagged("fast")})
    good = choice(1)
    bad = _store.Choice(key, "fast", 1.0, 2.0, _store.versions(""), {}, {}, 1.0)
    path = tmp_path / "file.json"
    path.write_text(table(bad, good, signature=f.signature).to_json())
    with pytest.warns(RuntimeWarning, match="does not fit this version"):
        assert hotop.tuner.load(path) == 1
    f(torch.ones(2))
    assert slow.calls == 0


def test_unknown_tactics_and_changed_rules_are_reported(tmp_path):
    f, _ = make("t::files", tactics={"fast": tagged("fast")})
    path = tmp_path / "file.json"
    path.write_text(table(choice(1, "gone"), signature=f.signature).to_json())
    with pytest.warns(RuntimeWarning, match="no tactic 'gone'"):
        assert hotop.tuner.load(path) == 0
    path.write_text(table(choice(1), signature="other").to_json())
    with pytest.warns(RuntimeWarning, match="other parameters or bucket rules"):
        assert hotop.tuner.load(path) == 0


def test_directory_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTOP_TUNER_DIR", str(tmp_path / "file" / "below"))
    f, _ = make("t::files", tactics={"fast": tagged("fast")})
    with pytest.warns(RuntimeWarning, match="they hold in this process"), tuning():
        f(torch.ones(2))
    f(torch.ones(2))
    assert f.hits == 1


def test_later_choice_wins_a_merge():
    old, new = choice(1, "old", at=1.0), choice(1, "new", at=2.0)
    for first, second in ((old, new), (new, old)):
        merged = table(first)
        merged.merge(table(second, choice(2)))
        tactics = {
            c.key[2]: c.tactic for c in merged.choices_of("t::files", "s", _store.versions(""))
        }
        assert tactics == {"int 1": "new", "int 2": "fast"}


def save_many(path, start):
    for n in range(start, start + 10):
        _store.save(table(choice(n)), path)


def test_processes_merge_under_the_lock(tmp_path):
    path = tmp_path / "shared.json"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=save_many, args=(path, 10 * i)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(_store.read(path).choices_of("t::files", "s", _store.versions(""))) == 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shared.json", "shared.json.lock"]


def test_command(tmp_path, capsys):
    one, two, out = (tmp_path / name for name in ("one.json", "two.json", "out.json"))
    _store.save(table(choice(1)), one)
    _store.save(table(choice(2), choice(3), name="t::more"), two)
    assert main(["tuner", "merge", str(out), str(one), str(two)]) == 0
    assert main(["tuner", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "t::files: 1 choices" in shown
    assert "float32[2]@cpu int 3" in shown
    assert main(["tuner", "clear", str(out), "--op", "t::more"]) == 0
    assert "2 choices dropped" in capsys.readouterr().out
    assert set(_store.read(out).ops) == {"t::files"}
    assert main(["tuner", "clear", str(out)]) == 0
    assert not _store.read(out).ops
    assert main(["tuner", "show", str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    other = table(choice(1))
    other.device["name"] = "another"
    two.write_text(other.to_json())
    assert main(["tuner", "merge", str(out), str(one), str(two)]) == 1
    assert "made for 'another'" in capsys.readouterr().err


RANK = """
    import sys, torch, hotop, torch.distributed as dist
    from torch import Tensor
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]),
                            world_size=2)
    rank = dist.get_rank()
    calls = []
    def slow(x):
        for _ in range(100):
            x = x + 0
        return x
    # Each rank finds another tactic fast, and sees a shape that the other does not.
    def tactic(number):
        def run(x: Tensor) -> Tensor:
            calls.append(number)
            return x + 0 if rank == number else slow(x)
        return run
    f = hotop.tunable("t::ranks", tactics={"zero": tactic(0), "one": tactic(1)})(
        lambda x: slow(x))
    try:
        with hotop.tuning(rounds=3, batch_us=20):
            f(torch.ones(3))
            f(torch.ones(10 + rank))
            if len(sys.argv) > 3 and rank == 1:
                raise RuntimeError("one rank fails")
    except RuntimeError as error:
        assert "one rank" in str(error)
    assert hotop.tuner.stats()["t::ranks"].choices == 3
    chosen = []
    for size in (3, 10, 11):
        calls.clear()
        f(torch.ones(size))
        chosen.extend(calls)
    assert f.hits == 3 and f.misses == 0
    print("chosen", chosen)
    hotop.tuner.agree()
    assert hotop.tuner.stats()["t::ranks"].choices == 3
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("extra", [[], ["fail"]])
def test_ranks_agree(tmp_path, extra):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    chosen = [[line for line in text.splitlines() if "chosen" in line] for text in outputs]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 1
    written = Path(os.environ["HOTOP_TUNER_DIR"])
    assert len(list(written.glob("*.json"))) == 1


def test_progress_line(capsys):
    pytest.importorskip("rich")
    f, _ = make("t::files", tactics={"fast": tagged("fast")})
    with tuning(progress=True, rounds=1, batch_us=5):
        f(torch.ones(2))
    shown = capsys.readouterr().err
    assert "tuning t::files" in shown
    with tuning(progress=False, retune=True, rounds=1, batch_us=5):
        f(torch.ones(2))
    assert capsys.readouterr().err == ""


def test_without_the_core(tmp_path):
    script = """
        import torch, hotop, warnings
        assert not hotop.is_native()
        f = hotop.tunable("t::pure", tactics={"other": lambda x: x * 2})(lambda x: x + x)
        op = hotop.custom_op("t::pure", f, mutates_args=(), schema="(Tensor x) -> Tensor")
        x = torch.ones(3)
        with hotop.tuning(rounds=1, batch_us=5):
            op(x)
        assert torch.equal(op(x), x * 2)
        assert hotop.tuner.stats()["t::pure"].hits == 1
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        check=True,
        env={**os.environ, "HOTOP_DISABLE": "1"},
    )
