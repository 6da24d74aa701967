"""The benchmark command: what it writes, what it refuses, and the parts it is made of."""

import argparse
import gc
import inspect
import json
import struct
from types import SimpleNamespace

import pytest
import torch

from hotop.bench import cli, compiled, contenders, population, suite, timing
from hotop.bench.cases import CASES, mode_context
from hotop.bench.contenders import CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN
from hotop.bench.population_bench import OpResult, PopulationResult
from hotop.bench.timing import Timing

RECORDS = population.load()


def run_bench(*arguments):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(argument) for argument in arguments]))


def read_png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    return struct.unpack(">II", data[16:24])


def plain(value):
    if isinstance(value, list):
        return [plain(element) for element in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def timing_of(nanoseconds):
    return Timing(nanoseconds, nanoseconds, nanoseconds, 1)


def op_result(name, plain_ns, hot_ns, custom_ns, define_ns):
    timings = {
        PLAIN: timing_of(plain_ns),
        HOTOP: timing_of(hot_ns),
        CUSTOM_OP: timing_of(custom_ns),
        DEFINE_IMPL: timing_of(define_ns),
    }
    return OpResult(name, "package", name, 3, True, "", timings)


# The command


def test_quick_run_writes_json_and_png(tmp_path, capsys):
    numbers, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    code = run_bench(
        "--quick", "--only", "tensors-1,keywords,clone", "--json", numbers, "--plot", picture
    )
    assert code == 0
    document = json.loads(numbers.read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert {"python", "cpu", "threads", "date"} <= document["machine"].keys()
    assert [case["name"] for case in document["cases"]] == ["tensors-1", "keywords", "clone"]
    for case in document["cases"]:
        assert {"plain", "custom_op", "define_impl", "hotop", "hotop_packet", "hotop_overload"} <= (
            case["timings"].keys()
        )
        for measured in case["timings"].values():
            assert 0 < measured["minimum_ns"] <= measured["median_ns"]
            assert measured["calls"] >= 1
        difference = case["timings"]["custom_op"]["minimum_ns"]
        difference -= case["timings"]["plain"]["minimum_ns"]
        assert case["tax_us"]["custom_op"] == pytest.approx(difference / 1e3)
    assert document["failures"] == []
    assert {target["title"] for target in document["targets"]} >= {"1 Tensor: tax"}
    assert document["compiled"] == []
    width, height = read_png_size(picture)
    assert width > 800
    assert height > 300
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "1 Tensor" in printed


def test_all_cases_but_the_compiled_ones_are_quick(tmp_path):
    numbers = tmp_path / "bench.json"
    assert run_bench("--quick", "--json", numbers) == 0
    document = json.loads(numbers.read_text())
    assert {case["name"] for case in document["cases"]} == {case.name for case in CASES}
    assert document["ns_per_further_tensor"].keys() == {"10 to 30", "30 to 51"}
    assert document["registration"]["minimum_ms"].keys() == {CUSTOM_OP, DEFINE_IMPL, HOTOP}
    assert document["compiled"] == []
    assert document["failures"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--only", "tensors-2"), "no such case: tensors-2; the cases are tensors-1"),
        (("--only", "mixed,nope,neither"), "no such cases: nope, neither"),
        (("--only", ","), "--only needs at least one case"),
        (("--plot", "picture.svg"), "FILE must end in .png"),
        (("--original", "--plot", "picture.png"), "nothing else"),
        (("--only", "registration", "--plot", "picture.png"), "nothing to draw"),
        (("--json", "no/such/folder/bench.json"), "the folder of no/such/folder/bench.json"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(arguments, sentence, capsys):
    assert run_bench(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""


def test_modes_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        run_bench("--original", "--population")
    assert "not allowed with" in capsys.readouterr().err


def test_a_failing_case_is_reported_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    broken = SimpleNamespace(name="tensors-1", title="broken", mutates_args=(), mode="grad")
    monkeypatch.setattr(suite, "CASES", (broken, *(c for c in CASES if c.name == "mutated")))
    numbers = tmp_path / "bench.json"
    assert run_bench("--quick", "--only", "tensors-1,mutated", "--json", numbers) == 1
    document = json.loads(numbers.read_text())
    assert [failure["name"] for failure in document["failures"]] == ["tensors-1"]
    assert [case["name"] for case in document["cases"]] == ["mutated"]
    assert "tensors-1 failed: AttributeError" in capsys.readouterr().out


def test_original_table(tmp_path, capsys):
    numbers = tmp_path / "original.json"
    assert run_bench("--original", "--quick", "--json", numbers) == 0
    document = json.loads(numbers.read_text())
    assert document["calls"] == 20_000
    assert len(document["timings"]) == 5
    saving = document["saving_us"]["helper_object"]
    assert document["saving_per_step_ms"]["helper_object"] == {
        "tunable_fp4_quantize": pytest.approx(1.26 * saving),
        "nvfp4_gemm": pytest.approx(0.84 * saving),
    }
    printed = capsys.readouterr().out
    assert "hotop.fast_custom_op, by object" in printed
    assert "1260 calls" in printed


def test_population_run_covers_the_ops_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("hotop.bench.population_bench.QUICK_SAMPLE", 12)
    numbers, picture = tmp_path / "population.json", tmp_path / "population.png"
    assert run_bench("--population", "--quick", "--json", numbers, "--plot", picture) == 0
    document = json.loads(numbers.read_text())
    assert len(document["ops"]) == 12
    assert document["failures"] == []
    assert document["tax_us"].keys() == {CUSTOM_OP, DEFINE_IMPL, HOTOP}
    assert document["geometric_mean_ratio"].keys() == {CUSTOM_OP, DEFINE_IMPL}
    read_png_size(picture)


# Timing


def test_loop_passes_arguments_as_written():
    calls = []

    def function(*args, **kwargs):
        calls.append((args, kwargs))

    loop = timing.make_loop(function, [1, "two"], {"name": 3})
    timing.time_calls(loop, 2)
    assert calls == [((1, "two"), {"name": 3})] * 2


def test_loop_looks_up_the_path_in_every_call():
    looked_up = []

    class Holder:
        def __getattr__(self, name):
            looked_up.append(name)
            return lambda value: None

    timing.time_calls(timing.make_loop(Holder(), [1], path=".op"), 3)
    assert looked_up == ["op"] * 3


def test_loop_prices_look_ups_without_calling_what_they_find():
    called = []
    holder = SimpleNamespace(ns=SimpleNamespace(op=lambda value: called.append("holder")))
    loop = timing.make_loop(lambda value: called.append("plain"), [1], discarded=(holder, ".ns.op"))
    timing.time_calls(loop, 2)
    assert called == ["plain"] * 2


def test_rounds_interleave_in_rotating_order():
    order = []
    loops = {
        name: timing.make_loop(lambda name=name: order.append(name), []) for name in ("a", "b", "c")
    }
    result = timing.time_interleaved(loops, rounds=3, calls=1)
    assert order[-9:] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert result.keys() == {"a", "b", "c"}
    assert all(measured.calls == 1 for measured in result.values())


def test_context_holds_where_the_loops_run():
    seen = []
    loop = timing.make_loop(lambda: seen.append(torch.is_inference_mode_enabled()), [])
    timing.time_interleaved(
        {"a": loop}, rounds=1, calls=1, context=lambda: mode_context("inference_mode")
    )
    assert seen
    assert all(seen)
    assert not torch.is_inference_mode_enabled()


def test_gc_is_off_while_timing_and_on_again_after_an_error():
    seen = []
    timing.time_interleaved(
        {"a": timing.make_loop(lambda: seen.append(gc.isenabled()), [])}, rounds=1, calls=1
    )
    assert not any(seen)
    assert gc.isenabled()

    def fail():
        raise RuntimeError("from the loop")

    with pytest.raises(RuntimeError, match="from the loop"):
        timing.time_interleaved({"a": timing.make_loop(fail, [])}, rounds=1, calls=1)
    assert gc.isenabled()


# Contenders and cases


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_of_a_case_runs_the_same_kernel(case):
    kernel = case.make_kernel()
    runs = []

    def counted(*args, **kwargs):
        runs.append(None)
        return kernel(*args, **kwargs)

    counted.__signature__ = inspect.signature(kernel)
    counted.__annotations__ = kernel.__annotations__
    ops = contenders.register(counted, case.mutates_args, name="counted")
    with mode_context(case.mode):
        loops = contenders.make_loops(ops, case.make_positional(), case.make_keywords())
        for loop in loops.values():
            before = len(runs)
            timing.time_calls(loop, 3)
            assert len(runs) == before + 3


def test_case_names_are_unique():
    names = suite.case_names()
    assert len(names) == len(set(names))


def test_compiled_case_puts_the_ops_back(monkeypatch):
    registered = []

    def register(*args, **kwargs):
        registered.append(contenders.register(*args, **kwargs))
        return registered[-1]

    monkeypatch.setattr(compiled, "register", register)
    result = compiled.measure(1, rounds=2)
    assert result.timings.keys() == result.bare.keys() == {CUSTOM_OP, DEFINE_IMPL, HOTOP}
    (ops,) = registered
    x = torch.ones(4)
    packet = getattr(torch.ops.hotop_bench_hot, ops.name)
    assert isinstance(packet.default, torch._ops.OpOverload)
    assert packet.default(x).data_ptr() == ops.kernel(x).data_ptr()


def test_compiled_case_refuses_a_program_that_does_not_call_through_the_packet():
    own, other = torch.zeros(4), torch.zeros(4)
    packet = SimpleNamespace(default=lambda x: own)
    bare, _ = compiled._functions(1)
    with pytest.raises(RuntimeError, match="does not call what stands in the op's place"):
        compiled._check_exchange(packet, bare, lambda x: [other], [torch.ones(4)])


# Population


def test_population_is_whole():
    assert len(RECORDS) == 1885
    assert len({record.identifier for record in RECORDS}) == 1885
    assert all(record.identifier.isidentifier() for record in RECORDS)


def test_kernels_take_the_arguments_of_their_schemas():
    for record in RECORDS:
        schema = torch._C.parse_schema("population::op" + record.schema)
        parameters = inspect.signature(population.make_kernel(record)).parameters
        assert list(parameters) == [argument.name for argument in schema.arguments]
        for argument in schema.arguments:
            parameter = parameters[argument.name]
            keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert keyword_only == argument.kwarg_only
            has_default = parameter.default is not inspect.Parameter.empty
            assert has_default == argument.has_default_value()


def test_kernels_give_their_schemas_back():
    for record in RECORDS:
        kernel = population.make_kernel(record)
        mutated = population.mutated_names(record.schema)
        assert torch.library.infer_schema(kernel, mutates_args=mutated) == record.schema


def test_kernels_return_what_their_schemas_say_and_no_alias():
    for record in RECORDS:
        returns = torch._C.parse_schema("population::op" + record.schema).returns
        arguments = population.make_arguments(record)
        result = population.make_kernel(record)(
            *arguments, **population.make_keyword_arguments(record)
        )
        results = result if len(returns) > 1 else [result] if returns else []
        assert result is None if not returns else len(results) == len(returns)
        tensors = []
        for kind, value in zip(returns, results, strict=True):
            expected = {"Tensor": torch.Tensor, "List[Tensor]": list, "int": int, "bool": bool}
            assert type(value) is expected[str(kind.type)]
            tensors += value if isinstance(value, list) else [value]
        tensors += [value for value in arguments if isinstance(value, torch.Tensor)]
        storages = [value.data_ptr() for value in tensors if isinstance(value, torch.Tensor)]
        assert len(storages) == len(set(storages))


def test_arguments_are_the_same_for_the_same_seed_and_half_the_optionals_are_none():
    given = total = 0
    for record in RECORDS:
        schema = torch._C.parse_schema("population::op" + record.schema)
        first, second = population.make_arguments(record), population.make_arguments(record)
        assert [plain(value) for value in first] == [plain(value) for value in second]
        positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        for argument, value in zip(positional, first, strict=True):
            if str(argument.real_type).startswith("Optional"):
                total += 1
                given += value is not None
            else:
                assert value is not None
    assert 0.45 < given / total < 0.55
    some = next(record for record in RECORDS if "Tensor?" in record.schema)
    drawn = {
        tuple(value is None for value in population.make_arguments(some, seed)) for seed in range(9)
    }
    assert len(drawn) > 1


def test_mutated_names_are_the_written_ones():
    schema = "(Tensor(a0!) x, Tensor y, Tensor(a2!)? z=None, Tensor(a3!)[] w) -> ()"
    assert population.mutated_names(schema) == {"x", "z", "w"}
    assert population.mutated_names("(Tensor x) -> Tensor") == set()


def test_population_statistics():
    result = PopulationResult(
        [op_result(f"op{index}", 100, 100 + 10 * index, 1_100, 300) for index in range(1, 102)]
    )
    distribution = result.distribution(HOTOP)
    assert distribution == {
        "min": pytest.approx(0.01),
        "p10": pytest.approx(0.11),
        "median": pytest.approx(0.51),
        "p90": pytest.approx(0.91),
        "p99": pytest.approx(1.00),
        "max": pytest.approx(1.01),
    }
    assert [op.name for op in result.worst(2)] == ["op101", "op100"]
    same = PopulationResult([op_result("op", 100, 110, 1_100, 300)] * 3)
    assert same.geometric_mean_ratio(CUSTOM_OP) == pytest.approx(100)
    assert same.geometric_mean_ratio(DEFINE_IMPL) == pytest.approx(20)
