"""The real population: every op of the census defines, is called directly and does as its twin."""

from typing import Any

import pytest
import torch

from hotop.bench.population import (
    Record,
    load,
    make_arguments,
    make_kernel,
    make_keyword_arguments,
    mutated_names,
)
from twin import HOWS, Arguments, Twin

CHUNKS = 20
RECORDS = load()


class Wrong:
    """A value that no schema type takes."""

    def __repr__(self) -> str:
        """Return a text without an address."""
        return "Wrong()"


# In each position of each op one of these is passed; some types take some of them.
WRONG_VALUES = [Wrong(), "text", None, 1.5, [Wrong()], torch.float32]


def calls(record: Record) -> dict[str, Arguments]:
    """Return good calls and bad ones, by a name that says what is special."""
    args = make_arguments(record)
    kwargs = make_keyword_arguments(record)
    names = [a.name for a in torch._C.parse_schema("p::op" + record.schema).arguments]
    found: dict[str, Arguments] = {
        "ordinary": (tuple(args), kwargs),
        "other optionals": (
            tuple(make_arguments(record, seed=1)),
            make_keyword_arguments(record, seed=1),
        ),
        "keywords": ((), {**dict(zip(names, args, strict=False)), **kwargs}),
        "too few": (tuple(args[:-1]), kwargs),
        "too many": ((*args, 1), kwargs),
        "unknown keyword": (tuple(args), {**kwargs, "unknown_keyword": 1}),
    }
    for position in range(len(args)):
        wrong = WRONG_VALUES[(record.index + position) % len(WRONG_VALUES)]
        found[f"wrong at {position}"] = (
            (*args[:position], wrong, *args[position + 1 :]),
            kwargs,
        )
    return found


def problems_of(record: Record) -> list[str]:
    """Return what is wrong with one op."""
    twin = Twin(
        make_kernel(record),
        mutates_args=sorted(mutated_names(record.schema)),
        name=record.identifier,
    )
    problems = []
    if twin.schemas[0] != twin.schemas[1]:
        problems.append(f"schemas {twin.schemas}")
    parsed = torch._C.parse_schema(f"NS::{record.identifier}{record.schema}")
    if twin.schemas[0] != str(parsed):
        problems.append(f"inferred {twin.schemas[0]}, the census has {record.schema}")
    for number, name in enumerate(calls(record)):
        made: Any = lambda n=name: calls(record)[n]  # noqa: E731
        hows = HOWS if name == "ordinary" else [HOWS[(record.index + number) % 3]]
        for how in hows:
            problems += check(twin, made, name, how, good=True if number < 3 else None)
    return problems


def check(twin: Twin, made: Any, name: str, how: str, good: bool | None) -> list[str]:
    """Compare one call; a good one has to be direct."""
    try:
        seen = twin.compare(made, how=how, backward=False)
    except AssertionError as error:
        return [f"{name}: {error}"]
    if good and seen["error"] is not None:
        return [f"{name} by {how}: refused: {seen['error']}"]
    if good and not twin.direct:
        return [f"{name} by {how}: not direct"]
    return []


def test_the_population_is_whole() -> None:
    assert len(RECORDS) == 1885


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_op_of_the_census(chunk: int) -> None:
    failures = []
    for record in RECORDS[chunk::CHUNKS]:
        problems = problems_of(record)
        if problems:
            failures.append(f"--- {record.package} {record.op}{record.schema}\n{problems[0]}")
    assert not failures, f"{len(failures)} ops\n" + "\n".join(failures)
