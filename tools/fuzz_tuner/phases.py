"""The phases of a case: the tuning block, calls after it, files that are read again, threads."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from tools.fuzz_tuner.case import Call, Case
from tools.fuzz_tuner.tunables import Drawn

import hotop

EFFORT: dict[str, Any] = {"rounds": 1, "warmup": 1, "batch_us": 5, "progress": False}


def run(case: Case, path: Path | None, said: list[str]) -> None:
    """Run all phases of a case."""
    with hotop.tuning(path, **EFFORT):
        for _ in range(case.rng.randrange(3, 9)):
            call = case.draw_call()
            case.keys.append(call)
            if case.among_threads:
                _among_threads(case, call)
                continue
            case.tune(call, call.recipe, said)
            if case.rng.random() < 0.3:
                case.tune(call, call.recipe.with_other_data(case.rng), said)
    case.after(case.tuned, "after tuning")
    case.report.counts["hits after tuning"] += case.drawn.tunable.hits
    case.report.counts["misses after tuning"] += case.drawn.tunable.misses
    if case.is_op or case.among_threads or case.rng.random() < 0.5:
        return
    hotop.tuner.clear()
    if path is not None:
        hotop.tuner.load(path)
    case.after(case.tuned, "from the file")
    if case.drawn.allowed:  # where the default is not allowed, a miss takes another tactic
        return
    if case.rng.random() < 0.5:
        _changed(case, path)
    else:
        _tampered(case, path or hotop.tuner.default_path())


def _among_threads(case: Case, call: Call) -> None:
    """Call from several threads, of which one measures."""
    recipe = call.recipe
    if case.drawn.kernel.is_random or recipe.context == "float64":
        return
    start = threading.Barrier(3)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            start.wait(10)
            for _ in range(2):
                case.compare(case.tuned, recipe, "in tuning", alone=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors or any(thread.is_alive() for thread in threads):
        case.found("threads hang or fail", [repr(errors)], recipe)
    case.report.counts["calls among threads"] += 6


def _changed(case: Case, path: Path | None) -> None:
    """Make the tunable again with a part changed, and see that the file's choices fit or go."""
    drawn, rng = case.drawn, case.rng
    change = rng.choice(("version", "no tactic applies", "no tactic is left", "rules"))
    again = _again(drawn, change)
    hotop.tuner.clear()
    if path is not None:
        hotop.tuner.load(path)
    _expect_the_default(case, again, f"with {change} changed")
    case.report.counts[f"files: {change}"] += 1


def _expect_the_default(case: Case, tunable: Any, title: str) -> None:
    offers = case.drawn.offers
    calls = {name: offer.calls for name, offer in offers.items()}
    for call in case.keys:
        case.compare(tunable, call.recipe, title)
    used = [name for name, offer in offers.items() if offer.calls > calls[name]]
    if used:
        case.found(f"{title} a choice of the file was used", used, case.keys[0].recipe)


def _tampered(case: Case, path: Path) -> None:
    """Read a file that is broken, or of another kind, from the usual place."""
    if not path.exists():
        return
    way = case.rng.choice(("cut", "device", "tactic", "torch", "format", "fifo", "folder"))
    text = path.read_text()
    usual = hotop.tuner.default_path()
    usual.unlink(missing_ok=True)
    if way == "fifo":
        os.mkfifo(usual)
    elif way == "folder":
        usual.mkdir()
    elif way == "cut":
        usual.write_text(text[: len(text) * 2 // 3])
    else:
        usual.write_text(_rewritten(text, way))
    hotop.tuner.clear()
    _expect_the_default(case, case.drawn.tunable, f"from a bad file ({way})")
    case.report.counts[f"files: {way}"] += 1


def _rewritten(text: str, way: str) -> str:
    document = json.loads(text)
    if way == "device":
        document["device"]["name"] += " of another kind"
    elif way == "format":
        document["version"] = 1
    for op in document["ops"].values():
        for choice in op["choices"]:
            if way == "tactic":
                choice["tactic"] = "gone"
            elif way == "torch":
                choice["versions"]["torch"] = "1.0"
    return json.dumps(document)


def _again(drawn: Drawn, change: str) -> Any:
    """Return a tunable of the same name, changed."""
    from hotop.tuner import Tactic, exact

    tactics: dict[str, Any] = {
        name: Tactic(offer, offer.ask if offer.applies is not None else None)
        for name, offer in drawn.offers.items()
    }
    parameters = drawn.tunable._parameters
    dims = {p.name: dict(p.buckets) for p in parameters if p.buckets}
    version = 1
    if change == "version":
        version = 2
    elif change == "no tactic applies":
        tactics = {
            name: Tactic(offer, lambda *_, **__: False) for name, offer in drawn.offers.items()
        }
    elif change == "no tactic is left":
        tactics = {}
    else:
        dims = {name: {0: exact(cap=512)} for name in drawn.kernel.in_rows}
    return hotop.tunable(
        drawn.name,
        dims=dims,
        ignore=[p.name for p in parameters if p.ignored],
        mutates_args=drawn.kernel.mutates,
        version=version,
        tactics=tactics,
    )(drawn.usual)
