"""Progress while the sweep runs, its bound in time, and its table at the end."""

from __future__ import annotations

import faulthandler
import os
import time
from collections import Counter

import pytest
from sweep import FAILED, HONOURED, KINDS, MODEL_FAILS, MODES, NOTHING, REFUSED

LIMIT = 20 * 60  # seconds, for all models together

_results = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[_results] = []


@pytest.fixture(scope="session")
def stderr(request):
    """The real one, which pytest redirects while it captures."""
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        copied = os.dup(2)
    with open(copied, "w") as file:
        yield file


@pytest.fixture(scope="session", autouse=True)
def bounded(stderr):
    """Ends even a model that hangs, and says where."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def record(request, stderr):
    """Keep a model's outcomes for the table, and show on a terminal how far the sweep is."""
    began = time.monotonic()
    kept = request.config.stash[_results]

    def keep(entry, outcomes):
        seconds = time.monotonic() - began
        kept.append((entry, outcomes, seconds))
        if stderr.isatty():
            count = Counter(outcome.verdict for outcome in outcomes)
            line = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
            of = request.session.testscollected
            print(
                f" {len(kept)}/{of} {entry.name}: {line} ({seconds:.1f} s)", file=stderr, flush=True
            )

    return keep


def pytest_terminal_summary(terminalreporter, config):
    results = config.stash.get(_results, [])
    if not results:
        return
    write = terminalreporter.write_line
    terminalreporter.section("what came of the models")
    write(
        f"{'family':<16}{'models':>7}{'tried':>7}{HONOURED:>10}{REFUSED:>9}{FAILED:>8}  not tried"
    )
    families = dict.fromkeys(entry.family for entry, _, _ in results)
    for family in (*families, "all"):
        mine = [r for r in results if family in (r[0].family, "all")]
        count = Counter(outcome.verdict for _, outcomes, _ in mine for outcome in outcomes)
        tried = count[HONOURED] + count[REFUSED] + count[FAILED]
        write(
            f"{family:<16}{len(mine):>7}{tried:>7}{count[HONOURED]:>10}{count[REFUSED]:>9}"
            f"{count[FAILED]:>8}  {count[NOTHING]} {NOTHING}, {count[MODEL_FAILS]} {MODEL_FAILS}"
        )
    write(f"Each model is tried with {' and '.join(KINDS)} pinned, {' and '.join(MODES)}.")
    write(
        "Refused: by a PinError, or by an error or an audit that says what to do, which then holds."
    )
    for verdict in (REFUSED, MODEL_FAILS, FAILED):
        for entry, outcomes, _ in results:
            details = {}
            for outcome in outcomes:
                if outcome.verdict == verdict:
                    details.setdefault(outcome.detail, []).append(f"{outcome.kind} {outcome.mode}")
            for detail, where in details.items():
                write(f"{verdict}: {entry.name} ({', '.join(where)}): {detail}")
    never = sum(outcome.never_ran for _, outcomes, _ in results for outcome in outcomes)
    pins = sum(outcome.pins for _, outcomes, _ in results for outcome in outcomes)
    write(f"{pins} pins; {never} of them on modules that the model's forward did not call")
    for entry, outcomes, _ in results:
        for remark in dict.fromkeys(text for outcome in outcomes for text in outcome.remarks):
            write(f"{entry.name}: {remark}")
    other = [entry.name for entry, outcomes, _ in results if any(o.other_dtype for o in outcomes)]
    # Each pinned module has given out what came in, or it had failed: see ``wrong_outputs``.
    write(
        f"{len(other)} models gave another output dtype under autocast: a pinned module gives "
        f"out what came in and not what its last op gives: {', '.join(other)}"
    )
    slow = sorted(results, key=lambda result: -result[2])[:5]
    write("slowest: " + ", ".join(f"{entry.name} {seconds:.0f} s" for entry, _, seconds in slow))
