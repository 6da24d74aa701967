"""LTX-2 end to end with few blocks: equal outputs, counts, roads, the account, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hotop
from hotop.__main__ import main

pytest.importorskip("diffusers")
pytest.importorskip("safetensors")
pytest.importorskip("hotop._nvfp4")

from hotop.ltx2 import attribution, goals, measure, outputs, session, tuned, variants
from hotop.ltx2.attribution import TightTax, attribute
from hotop.ltx2.kernels import FAKES, GEMM, OP_NAMES, QUANTIZE, REAL, TRIVIAL, load
from hotop.ltx2.measure import CPU, WALL, Phase, Setting, Workload
from hotop.ltx2.programs import GRAD_MODES, same
from hotop.ltx2.python_tuner import DynamicDimension, PythonTuner, Runner, TuningSpace
from hotop.ltx2.session import BARE
from hotop.ltx2.variants import CPP_OP, CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN, VARIANTS
from hotop.ltx2.widths import LINEARS_PER_BLOCK, WIDTHS

BLOCKS, STEPS = 2, 2


class Quiet:
    """A progress that shows nothing."""

    def phase(self, title: str, total: int, *, timed: bool = True) -> Any:
        from contextlib import nullcontext

        return nullcontext(lambda: None)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = measure.single_thread()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prepared() -> tuple[Workload, session.Result]:
    options = session.Options(WIDTHS["small"], BLOCKS, STEPS, 1, ())
    return session.prepare(options, Quiet())


def run_setting(prepared: tuple[Workload, session.Result], setting: Setting) -> Phase:
    work, _ = prepared
    with GRAD_MODES[setting.grad_mode]():
        made = session.variants_of(setting)
        if setting.tuner:
            tuned.tuned_variants(setting.kernel).tune(session.record_arguments(work, REAL))
        return session._measure(setting, made, work, Quiet())


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("kernel", [TRIVIAL, REAL])
def test_eager_variants_agree(prepared: Any, kernel: str, grad_mode: str) -> None:
    phase = run_setting(prepared, Setting(kernel, grad_mode, False))
    assert phase.differences == []
    assert set(phase.names) >= set(VARIANTS)
    assert {len(times) for times in phase.samples_ns[WALL].values()} == {STEPS}


@pytest.mark.parametrize(("kernel", "grad_mode"), [(REAL, "no_grad"), (TRIVIAL, "inference_mode")])
def test_compiled_variants_agree_with_one_graph_each(
    prepared: Any, kernel: str, grad_mode: str
) -> None:
    phase = run_setting(prepared, Setting(kernel, grad_mode, True))
    assert phase.differences == []
    assert phase.graphs == len(phase.compile_s) == len(VARIANTS) - 1
    assert phase.recompiles == 0
    assert BARE in phase.names


def test_variants_with_tuners_agree_and_hit(prepared: Any) -> None:
    phase = run_setting(prepared, Setting(REAL, "no_grad", False, tuner=True))
    assert phase.differences == []
    assert phase.misses == 0
    assert set(phase.names) >= set(tuned.TUNED_VARIANTS)


def test_a_wrong_kernel_is_noticed(prepared: Any) -> None:
    work, _ = prepared
    setting = Setting(TRIVIAL, "no_grad", False)
    made = dict(variants.variants(TRIVIAL))
    made[CUSTOM_OP] = variants.variants(REAL)[CUSTOM_OP]
    with torch.no_grad():
        phase = session._measure(setting, made, work, Quiet())
    assert len(phase.differences) == STEPS
    assert all(CUSTOM_OP in line for line in phase.differences)


def test_every_linear_is_converted_and_called_once(prepared: Any) -> None:
    work, result = prepared
    expected = BLOCKS * LINEARS_PER_BLOCK
    assert result.converted == expected
    assert result.calls == {QUANTIZE: expected, GEMM: expected}
    outside = [m for m in work.board.model.modules() if type(m) is torch.nn.Linear]
    assert outside, "the linears outside the blocks stay"
    assert result.failures == []
    result = replace(result, calls={QUANTIZE: expected, GEMM: expected - 1})
    assert any("expected" in line for line in result.failures)


def test_the_quantized_model_follows_the_float_model(prepared: Any) -> None:
    _, result = prepared
    assert 0 < result.relative_error < 0.3


@pytest.mark.parametrize("tuner", [False, True])
@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("kernel", [TRIVIAL, REAL])
def test_every_hotop_call_is_direct(
    prepared: Any, kernel: str, grad_mode: str, tuner: bool
) -> None:
    if not hotop.is_native():
        pytest.skip("needs the C++ core")
    work, _ = prepared
    setting = Setting(kernel, grad_mode, False, tuner)
    with GRAD_MODES[grad_mode]():
        arguments = session.record_arguments(work, kernel)
        made = session.variants_of(setting)
        assert session.indirect_calls(setting, made, arguments) == []
    # And the check can fail: a subclass of Tensor.
    x = torch.ones(4, 32).as_subclass(type("Special", (torch.Tensor,), {}))
    arguments[QUANTIZE] = [(x, torch.ones(()), 16, True)]
    assert len(session.indirect_calls(setting, made, arguments)) == 1


@pytest.mark.parametrize("kernel", [TRIVIAL, REAL])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(8, 64), (1, 4, 32), (2, 130, 80)])
def test_fakes_have_the_kernels_shapes(kernel: str, swizzled: bool, shape: tuple[int, ...]) -> None:
    kernels = load(kernel)
    given = (torch.ones(shape), torch.ones(()), 16, swizzled)
    real, fake = kernels.quantize(*given), FAKES[QUANTIZE](*given)
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]
    if swizzled:
        weight, scale = kernels.quantize(torch.ones(48, shape[-1]), torch.ones(()), 16, True)
        given = (real[0], weight, real[1], scale, torch.ones(()), torch.float32)
        product, expected = kernels.gemm(*given), FAKES[GEMM](*given)
        assert (product.shape, product.dtype) == (expected.shape, expected.dtype)


def test_load_rejects_unknown_kernels() -> None:
    with pytest.raises(ValueError, match="one of trivial, real, got 'fast'"):
        load("fast")


def test_same_sees_one_bit() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same((nan, nan), (nan.clone(), nan.clone()))
    assert not same((nan, torch.tensor([0.0])), (nan, torch.tensor([-0.0])))


def make_phase(setting: Setting, base: str, ms: dict[str, list[float]]) -> Phase:
    samples = {name: [int(t * 1e6) for t in times] for name, times in ms.items()}
    return Phase(setting, base, {CPU: samples, WALL: samples})


def test_attribution_arithmetic() -> None:
    phase = make_phase(
        Setting(TRIVIAL, "no_grad", False),
        PLAIN,
        {PLAIN: [10, 30, 20], CUSTOM_OP: [20, 41, 30], HOTOP: [10, 31, 21]},
    )
    tax = {
        QUANTIZE: {PLAIN: 0.0, CUSTOM_OP: 10.0, HOTOP: 1.0},
        GEMM: {PLAIN: 0.0, CUSTOM_OP: 20.0, HOTOP: 1.0},
    }
    found = attribute(phase, {QUANTIZE: 300, GEMM: 100}, TightTax(tax, tax))
    assert found.calls == 400
    assert found.tight_us == {PLAIN: 0.0, CUSTOM_OP: 12.5, HOTOP: 1.0}
    assert found.model_us == pytest.approx({PLAIN: 0.0, CUSTOM_OP: 25.0, HOTOP: 2.5})
    assert found.share == pytest.approx({PLAIN: 0.0, CUSTOM_OP: 1 / 3, HOTOP: 1 / 21})
    assert found.estimated_ms == pytest.approx(5.0 - 0.4)
    assert found.measured_ms == pytest.approx(10.0)
    assert found.left_ms == 21
    with pytest.raises(ValueError, match="at least one op call"):
        attribute(phase, {QUANTIZE: 0, GEMM: 0}, TightTax(tax, tax))


def test_tight_taxes_are_above_the_plain_call(prepared: Any) -> None:
    work, _ = prepared
    with torch.no_grad():
        arguments = {
            name: calls[0] for name, calls in session.record_arguments(work, TRIVIAL).items()
        }
        made = variants.variants(TRIVIAL)
        tight = attribution.measure_tight(made, arguments, torch.no_grad, 3)
    for op in OP_NAMES:
        assert set(tight.median_us[op]) == set(made)
        assert tight.median_us[op][PLAIN] == tight.minimum_us[op][PLAIN] == 0.0


def test_goals_compare_the_right_programs() -> None:
    eager = make_phase(
        Setting(REAL, "no_grad", False), PLAIN, {PLAIN: [100, 100], HOTOP: [102, 102]}
    )
    times = {CUSTOM_OP: [300], DEFINE_IMPL: [120], CPP_OP: [101], HOTOP: [100], BARE: [99]}
    compiled = make_phase(Setting(TRIVIAL, "no_grad", True), BARE, times)
    found = goals.goals([eager, compiled])
    assert [(round(goal.measured, 6), goal.met) for goal in found] == [
        (2.0, False),
        (3.0, True),
        (1.2, False),
        (1.01, True),
    ]
    with_tuner = make_phase(
        Setting(TRIVIAL, "no_grad", False, tuner=True),
        PLAIN,
        {
            PLAIN: [9],
            HOTOP: [10],
            tuned.HOTOP_PYTHON_TUNER: [30],
            tuned.HOTOP_TUNER: [11],
        },
    )
    (goal,) = goals.goals([with_tuner])
    assert (round(goal.measured, 6), goal.met) == (95.0, True)


@pytest.mark.parametrize(
    ("plain", "hot", "verdict"),
    [
        ([100, 103, 99, 102], [102, 105, 101, 104], "too short to tell"),
        ([100, 100, 100, 100], [102, 102, 102, 102], "NOT MET"),
        ([100, 102, 100, 102], [150, 153, 150, 153], "too short to tell"),
        ([100, 100, 100, 100], [100, 100, 100, 100], "met"),
    ],
)
def test_a_short_run_says_what_it_cannot_tell(
    plain: list[int], hot: list[int], verdict: str
) -> None:
    phase = make_phase(Setting(REAL, "no_grad", False), PLAIN, {PLAIN: plain, HOTOP: hot})
    (goal,) = goals.goals([phase])
    assert goal.verdict(is_short=True) == verdict
    assert goal.verdict(is_short=False) == ("met" if goal.met else "NOT MET"), "strict"
    compiled = make_phase(
        Setting(REAL, "no_grad", True), BARE, {BARE: plain, HOTOP: plain, CPP_OP: [500] * 4}
    )
    (goal,) = goals.goals([compiled])
    assert goal.verdict(is_short=True) == "met", "far from the limit"


def test_python_tuner_buckets_and_leaves_out() -> None:
    tuner, runner = PythonTuner(), Runner("blas", (min, max))
    space = TuningSpace((DynamicDimension(0, -2, lambda size: -(-size // 8) * 8),), ((1, 0),))
    tuner.learn("op", runner, space, [torch.ones(8, 4), torch.ones(3)], 1)
    same_bucket = [torch.ones(5, 4), torch.ones(7)]
    assert tuner.choose("op", [Runner("blas", (min, max))], space, same_bucket)[1] == 1
    assert tuner.choose("op", [runner], space, [torch.ones(9, 4), torch.ones(3)])[1] == 0
    assert tuner.choose("op", [Runner("int8", ())], space, same_bucket)[1] == 0
    assert (tuner.hits, tuner.misses) == (1, 2)


def test_latents_files(tmp_path: Path) -> None:
    video, audio = torch.arange(32.0).reshape(1, 8, 4), torch.ones(1, 3, 4)
    for name in ("a.safetensors", "a.npz"):
        outputs.write_latents(tmp_path / name, video, audio, (2, 2, 2))
    import numpy as np
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "a.safetensors")
    assert stored["video"].shape == (4, 2, 2, 2)
    assert stored["video"][1, 1, 0, 1] == video[0, 5, 1]
    zipped = np.load(tmp_path / "a.npz")
    assert (zipped["video"] == stored["video"].numpy()).all()
    assert (zipped["audio"] == audio[0].numpy()).all()
    with pytest.raises(ValueError, match=r"\.safetensors or \.npz, got 'a\.txt'"):
        outputs.write_latents(tmp_path / "a.txt", video, audio, (2, 2, 2))


def command(*words: str) -> int:
    import argparse

    from hotop.ltx2 import cli

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(words))


def test_quick_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "--json": tmp_path / "a.json",
        "--plot": tmp_path / "a.png",
        "--latents": tmp_path / "l.npz",
        "--preview": tmp_path / "p.png",
    }
    words = [word for name, path in files.items() for word in (name, str(path))]
    sizes = ("--blocks", "1", "--steps", "2", "--rounds", "1")
    assert command("--quick", "--no-compile", "--tuner", *sizes, *words) == 0
    for path in files.values():
        assert path.stat().st_size > 0
    data = json.loads(files["--json"].read_text(encoding="utf-8"))
    assert data["calls_per_step"] == {QUANTIZE: LINEARS_PER_BLOCK, GEMM: LINEARS_PER_BLOCK}
    assert data["failures"] == []
    assert [phase["tuner"] for phase in data["phases"]] == [False, True]
    said = capsys.readouterr().out
    assert "random weights, so the latents are noise" in said
    assert "Equal bit for bit" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--json", "no/such/folder/a.json"], "--json: there is no folder no/such/folder"),
        (["--preview", "."], "--preview must be a file, but . is a folder"),
        (["--latents", "a.txt"], "--latents must end in .safetensors or .npz, got a.txt"),
        (["--plot", "a.gif"], "--plot must end in .png, .svg or .pdf, got a.gif"),
        (["--ulysses"], "--ulysses needs torchrun"),
        (["--ulysses", "--tuner"], "--ulysses cannot be combined with --tuner"),
    ],
)
def test_wrong_options_are_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert sentence in said.err


@pytest.mark.parametrize("words", [["--steps", "0"], ["--blocks", "x"], ["--width", "huge"]])
def test_wrong_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command(*words)
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_ranks_that_do_not_divide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert command("--ulysses") == 2
    assert "3 ranks do not divide the 2 video heads of small" in capsys.readouterr().err


def test_the_program_does_not_import_diffusers_for_other_commands() -> None:
    code = (
        "import sys, hotop.ltx2.cli, hotop.__main__\n"
        "assert 'diffusers' not in sys.modules\n"
        "assert 'hotop.ltx2.session' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    path = tmp_path / "u.json"
    code = (
        "import argparse, sys; from hotop.ltx2 import cli\n"
        "p = argparse.ArgumentParser(); cli.add_arguments(p)\n"
        "sys.exit(cli.run(p.parse_args()))\n"
    )
    script = tmp_path / "ranks.py"
    script.write_text(code, encoding="utf-8")
    words = ["--ulysses", "--blocks", "1", "--steps", "2", "--rounds", "1", "--json", str(path)]
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script), *words),
        ],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["equal"]
    alone, *shared = data["ranks"]
    assert [report["rank"] for report in shared] == [0, 1]
    for report in shared:
        assert report["video_tokens"] == alone["video_tokens"] // 2
        assert report["calls"] == alone["calls"]
        assert report["gemm_mflop"] < alone["gemm_mflop"]


def test_main_knows_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["ltx2", "--help"])
    assert stopped.value.code == 0
    assert "--ulysses" in capsys.readouterr().out
