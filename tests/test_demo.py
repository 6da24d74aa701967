"""The demo: what it claims when the variants agree, and that it notices when they do not."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hotop.demo import cli, phases
from hotop.demo.generate import PROMPT, Track, first_difference, position_count
from hotop.demo.model import NORM_EPS, ROTARY_BASE, SHAPES, Decoder, KVCache, Shape, build_decoder
from hotop.demo.ops import CUSTOM_OP, DEFINE_IMPL, HOTOP, OP_NAMES, PLAIN, OpSet, op_sets

SMALL = ("--tokens", "4", "--layers", "2", "--rounds", "1")
VARIANTS = {PLAIN, CUSTOM_OP, DEFINE_IMPL, HOTOP}


def run_demo(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the demo in this process and return its exit code and JSON."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    file = tmp_path / "demo.json"
    code = cli.run(parser.parse_args([*SMALL, *options, "--json", str(file)]))
    return code, json.loads(file.read_text(encoding="utf-8"))


def put_in(monkeypatch: pytest.MonkeyPatch, variant: str, **broken: Callable[..., Any]) -> None:
    """Let the demo run with some ops of one variant replaced."""
    sets = op_sets()
    monkeypatch.setattr(cli, "op_sets", lambda: {**sets, variant: replace(sets[variant], **broken)})


def observed_arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments that the model gives to each op."""
    shape, positions = SHAPES["stories260k"].with_layers(1), position_count(1)
    decoder = build_decoder(shape, positions, 0)
    work = phases.Workload(decoder, shape, op_sets(), positions, 1, 0)
    with torch.no_grad():
        return phases.observe_step(work)[1]


def whole_sequence_logits(decoder: Decoder, shape: Shape, tokens: Tensor) -> Tensor:
    """The decoder's function, written again without its ops and without a cache."""
    count, dim = len(tokens), shape.head_dim
    turns = torch.arange(count)[:, None] / ROTARY_BASE ** (torch.arange(0, dim, 2) / dim)

    def rotated(heads: Tensor) -> Tensor:
        pairs = torch.complex(heads[..., : dim // 2], heads[..., dim // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(turns), turns)
        return torch.cat((pairs.real, pairs.imag), -1)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, NORM_EPS)

    x = decoder.embedding.weight[tokens]
    for layer in decoder.layers:
        qkv = F.linear(normed(x, layer.input_norm), layer.attention.qkv.weight)
        heads = qkv.view(count, -1, dim).transpose(0, 1)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads))
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, 0) for t in (rotated(k), v))
        attended = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + F.linear(attended.transpose(0, 1).flatten(1), layer.attention.out.weight)
        gate, up = F.linear(normed(x, layer.mlp_norm), layer.gate_up.weight).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down.weight)
    return F.linear(normed(x, decoder.final_norm), decoder.head.weight)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_steps_compute_a_llama_decoder(variant: str) -> None:
    shape = SHAPES["stories260k"].with_layers(2)
    tokens = torch.tensor(list(b"a step at a time"))
    decoder, cache = build_decoder(shape, len(tokens) + 3, 7), KVCache(shape, len(tokens) + 3)
    with torch.no_grad():
        steps = [
            decoder(op_sets()[variant], token.view(1), torch.tensor([position]), cache)
            for position, token in enumerate(tokens)
        ]
        torch.testing.assert_close(
            torch.stack(steps), whole_sequence_logits(decoder, shape, tokens), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("options", [(), ("--inference-mode",)], ids=["no_grad", "inference_mode"])
def test_variants_agree(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, found = run_demo(tmp_path, "--no-compile", *options)
    assert code == 0
    assert found["failures"] == []
    # Two layers: five ops in each, and the final norm.
    assert sum(found["op_calls_per_step"].values()) == 11
    assert set(found["op_calls_per_step"]) == set(OP_NAMES)
    assert set(found["phases"]) == {"eager"}
    eager = found["phases"]["eager"]
    assert set(eager["compared"]) == VARIANTS
    assert eager["equal"] is True
    assert eager["text"].startswith(PROMPT)
    assert len(eager["text"]) == len(PROMPT) + 4
    assert eager["text"].isprintable()
    for row in eager["variants"].values():
        assert row["steps"] == position_count(4)
        assert 0 < row["step_min_us"] <= row["step_median_us"]
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == 1


def test_text_depends_on_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, sound = run_demo(tmp_path, "--no-compile")
    monkeypatch.setattr(cli, "SEED", cli.SEED + 1)
    _, other = run_demo(tmp_path, "--no-compile")
    assert sound["phases"]["eager"]["text"] != other["phases"]["eager"]["text"]


def one_ulp_off(x: Tensor) -> Tensor:
    """The activation with one element wrong in its last bit."""
    out = op_sets()[PLAIN].silu_and_mul(x)
    out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(torch.inf))
    return out


def no_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """The fused norm without its write to the residual."""
    op_sets()[PLAIN].fused_add_rms_norm(x, residual.clone(), weight, eps)


def no_write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor) -> None:
    """The cache update that updates nothing."""


def unrotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Any:
    """The rotary embedding without rotation."""
    return q.clone(), k.clone()


def no_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm without eps."""
    return op_sets()[PLAIN].rms_norm(x, weight, 0.0)


BROKEN = {
    "rms_norm": no_eps,
    "fused_add_rms_norm": no_add,
    "rotary": unrotated,
    "silu_and_mul": one_ulp_off,
    "cache_update": no_write,
}


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *((HOTOP, name) for name in OP_NAMES),
        (CUSTOM_OP, "silu_and_mul"),
        (DEFINE_IMPL, "silu_and_mul"),
    ],
)
def test_broken_kernel_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variant: str,
    name: str,
) -> None:
    put_in(monkeypatch, variant, **{name: BROKEN[name]})
    code, found = run_demo(tmp_path, "--no-compile")
    assert code == 1
    assert found["phases"]["eager"]["equal"] is False
    assert [line.split(": ")[1] for line in found["failures"]] == [variant]
    assert f"FAILED: {found['failures'][0]}" in capsys.readouterr().out


@pytest.fixture
def traced_without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with Dynamo and AOTAutograd but run the graphs as they are: no C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("traced_without_inductor")
def test_compiled_variants_agree_in_one_graph_each(tmp_path: Path) -> None:
    code, found = run_demo(tmp_path)
    assert code == 0
    compiled = found["phases"]["compiled"]
    assert set(compiled["compared"]) == VARIANTS - {PLAIN}
    assert compiled["equal"] is True
    assert compiled["graphs"] == len(VARIANTS)
    assert compiled["recompiles"] == 0
    assert set(compiled["compile_s"]) == VARIANTS


@pytest.mark.usefixtures("traced_without_inductor")
def test_broken_kernel_is_reported_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(monkeypatch, HOTOP, rotary=unrotated)
    code, found = run_demo(tmp_path)
    assert code == 1
    assert found["phases"]["compiled"]["equal"] is False
    assert [line.split(",")[0] for line in found["failures"]] == ["eager", "compiled"]


@pytest.mark.usefixtures("traced_without_inductor")
def test_recompilation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def specialized(decoder: Any, ops: OpSet) -> Callable[..., Tensor]:
        step = 0

        def forward(*args: Any) -> Tensor:
            nonlocal step
            step += 1
            return compiled(*args, step > 2)

        # The bool is a constant of the graph: its change compiles the step again.
        compiled = torch.compile(
            lambda token, position, cache, late: decoder(ops, token, position, cache) + late,
            isolate_recompiles=True,
        )
        return forward

    monkeypatch.setattr(phases, "compiled_forward", specialized)
    code, found = run_demo(tmp_path, "--layers", "1")
    assert code == 1
    assert found["phases"]["compiled"]["recompiles"] == len(VARIANTS)
    assert found["failures"] == [f"compiled: {len(VARIANTS)} graphs were compiled again"]


def test_difference_of_tokens_alone_is_seen() -> None:
    logits = [torch.zeros(3)]
    assert first_difference(Track([1, 2], logits), Track([1, 2], logits)) is None
    assert "token of step 0" in first_difference(Track([1, 2], logits), Track([1, 3], logits))


@pytest.mark.parametrize("name", OP_NAMES)
@pytest.mark.parametrize("variant", [CUSTOM_OP, HOTOP])
def test_ops_keep_their_schema_and_fake(variant: str, name: str) -> None:
    op = getattr(op_sets()[variant], name)
    # Without gradients: the ops have no autograd formula.
    arguments = [a.detach() if isinstance(a, Tensor) else a for a in observed_arguments()[name]]
    torch.library.opcheck(op, arguments)


def demo_process(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as a user does, with its output going to a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "hotop", "demo", *SMALL, "--no-compile", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_prints_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    done = demo_process("--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert "equal bit for bit" in done.stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    for line in found["summary"]:
        assert line in done.stdout


def test_command_runs_without_the_core() -> None:
    done = demo_process(HOTOP_DISABLE="1")
    assert done.returncode == 0, done.stderr
    assert "hotop runs without its C++ core" in done.stdout


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_token_count_must_be_positive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_demo(tmp_path, "--tokens", value)
    assert stopped.value.code == 2
    assert "--tokens" in capsys.readouterr().err
