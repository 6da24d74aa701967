"""Exported models run in eager: the step today and with PyTorch's operators accelerated."""

import io
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from time import thread_time_ns
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import hotop
from hotop.bench.cases import INFERENCE_MODE, NO_GRAD, mode_context
from hotop.bench.existing_ops import ACCELERATED, TODAY
from hotop.bench.timing import Timing, gc_paused

__all__ = ["MODULE", "Model", "ModelRow", "make_models", "measure_models", "missing_packages"]

MODULE = "module"
# Each contender settles before it is timed: the classes of the operators have just changed.
_WARM_UP_STEPS = 5
_STEPS = 10
_ROUNDS = 10

_Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """A model with random weights and the inputs of one step."""

    name: str
    module: nn.Module
    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None

    def named(self) -> dict[str, Any]:
        """Returns the inputs passed by name."""
        return dict(self.keywords or {})


@dataclass(frozen=True)
class ModelRow:
    """One model in one mode.

    Attributes:
        name: The model.
        mode: ``no_grad`` or ``inference_mode``.
        calls: Operator calls of a step.
        overloads: Different operators among them.
        equal: Whether the accelerated program's outputs have today's bits.
        roads: Calls of one accelerated step by road.
        step: The thread's time of a step: of the module that was exported, of the program today,
            and accelerated.
        operators: The time of the step's operator calls alone, today and accelerated.
    """

    name: str
    mode: str
    calls: int
    overloads: int
    equal: bool
    roads: dict[str, int]
    step: dict[str, Timing]
    operators: dict[str, Timing]

    def speedup(self, *, median: bool = False) -> float:
        """Returns how many times faster the accelerated step is."""
        today, accelerated = self.step[TODAY], self.step[ACCELERATED]
        if median:
            return today.median_ns / accelerated.median_ns
        return today.minimum_ns / accelerated.minimum_ns

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return asdict(self) | {
            "speedup": self.speedup(),
            "speedup_median": self.speedup(median=True),
        }


def missing_packages() -> list[str]:
    """Returns the packages that the models come from and that are not installed."""
    return [package for package in ("transformers", "diffusers") if find_spec(package) is None]


def make_models(*, quick: bool = False) -> list[Model]:
    """Makes the models: the depth of a real one each, a width at which the host is the limit.

    BERT has bert-base's 12 layers, Llama the 16 of Llama 3.2 1B, the UNet the four stages of Stable
    Diffusion 1.5 with two layers each; a quick run takes less of each.
    """
    # Imported late: they belong to an extra, and importing them takes seconds.
    from diffusers import UNet2DConditionModel
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
        sizes["max_position_embeddings"] = 32
        bert = BertConfig(**sizes, num_hidden_layers=2 if quick else 12, num_attention_heads=2)
        llama = LlamaConfig(
            **sizes,
            num_hidden_layers=2 if quick else 16,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        stages: dict[str, Any] = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 2}
        if quick:
            stages = {"block_out_channels": (8, 16), "layers_per_block": 1}
            stages["down_block_types"] = ("CrossAttnDownBlock2D", "DownBlock2D")
            stages["up_block_types"] = ("UpBlock2D", "CrossAttnUpBlock2D")
        unet: Any = UNet2DConditionModel(
            sample_size=8, cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4, **stages
        )
        words = {"input_ids": torch.arange(8)[None]}
        mask = {"attention_mask": torch.ones(1, 8, dtype=torch.int64)}
        noise = (torch.randn(1, 4, 8, 8), torch.tensor(10), torch.randn(1, 4, 16))
        return [
            Model("BERT", BertModel(bert).eval(), keywords=words | mask),
            Model("Llama", LlamaForCausalLM(llama).eval(), keywords=words),
            Model("UNet", unet.eval(), noise),
        ]
    finally:
        torch.random.set_rng_state(generator)


def save_and_load(model: Model) -> torch.export.ExportedProgram:
    """Exports a model, saves the program and loads it, as a server would get it."""
    with torch.no_grad():
        program = torch.export.export(model.module, model.positional, model.named())
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


class _Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps its operator calls with their arguments."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[_Call] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if isinstance(n.target, OpOverload):
            self.calls.append((n.target, *self.fetch_args_kwargs_from_env(n)))
        return super().run_node(n)


def measure_models(
    models: Sequence[Model],
    *,
    quick: bool = False,
    on_model: Callable[[str], None] = lambda name: None,
) -> list[ModelRow]:
    """Exports, saves, loads and times each model in each mode."""
    rounds = 2 if quick else _ROUNDS
    rows = []
    for model in models:
        on_model(f"{model.name}: export")
        program = save_and_load(model)
        # Two modules of one program: each has code of its own, which CPython specialises for the
        # operators as that contender has them.
        modules = {TODAY: program.module(), ACCELERATED: program.module()}
        for mode in (NO_GRAD, INFERENCE_MODE):
            on_model(f"{model.name}, {mode}")
            with mode_context(mode):
                rows.append(_measure(model, modules, mode, rounds))
    return rows


def _measure(
    model: Model, modules: Mapping[str, torch.fx.GraphModule], mode: str, rounds: int
) -> ModelRow:
    recorder = _Recorder(modules[TODAY])
    recorder.run(*pytree.tree_leaves((model.positional, model.named())))
    calls = recorder.calls

    def replay() -> None:
        for overload, args, kwargs in calls:
            overload(*args, **kwargs)

    def run(module: Callable[..., Any]) -> Callable[[], Any]:
        keywords = model.named()
        return lambda: module(*model.positional, **keywords)

    expected = run(modules[TODAY])()
    fast = run(modules[ACCELERATED])
    with _Aten():
        before = _road_counts()
        found = fast()
        roads = _road_counts()
    roads.subtract(before)

    step: dict[str, list[float]] = {MODULE: [], TODAY: [], ACCELERATED: []}
    operators: dict[str, list[float]] = {TODAY: [], ACCELERATED: []}
    with gc_paused():
        for _ in range(rounds):
            step[MODULE] += _time(run(model.module))
            step[TODAY] += _time(run(modules[TODAY]))
            operators[TODAY] += _time(replay)
            with _Aten():
                step[ACCELERATED] += _time(fast)
                operators[ACCELERATED] += _time(replay)
    return ModelRow(
        model.name,
        mode,
        len(calls),
        len({overload for overload, _, _ in calls}),
        _same_bits(expected, found),
        dict(roads),
        {name: _summary(times) for name, times in step.items()},
        {name: _summary(times) for name, times in operators.items()},
    )


class _Aten:
    """All of PyTorch's operators, accelerated inside and restored afterwards."""

    def __enter__(self) -> None:
        hotop.accelerate("aten")

    def __exit__(self, *exception: object) -> None:
        hotop.restore("aten")


def _road_counts() -> Counter[str]:
    counts: Counter[str] = Counter()
    for op in hotop.report().ops:
        counts.update(direct=op.direct, boxed=op.boxed, pytorch=op.pytorch)
    return counts


def _same_bits(expected: object, found: object) -> bool:
    first, second = pytree.tree_leaves(expected), pytree.tree_leaves(found)
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _time(run: Callable[[], object]) -> list[float]:
    """Times each of a few steps.

    By the thread's own clock: a step takes long enough for a shared machine to interrupt it, and
    with one thread it does not wait for anything.
    """
    for _ in range(_WARM_UP_STEPS):
        run()
    times = []
    for _ in range(_STEPS):
        start = thread_time_ns()
        run()
        times.append(float(thread_time_ns() - start))
    return times


def _summary(times: Sequence[float]) -> Timing:
    return Timing(min(times), statistics.median(times), statistics.fmean(times), 1)
