"""What sets of pins are worth by their shares."""

from torch import nn

from dtypepin._advice.candidates import Candidate
from dtypepin._advice.worth import Worth
from dtypepin._base.selection import named


def worth_of(**settings):
    """Candidates ``outer``, ``outer.0``, ``outer.1`` and ``other``."""
    model = nn.Module()
    model.outer, model.other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    given = {name.replace("_", "."): values for name, values in settings.items()}
    found = [m for m in named(model) if m.names[0] in given]
    return Worth([Candidate(m, **given[m.names[0]]) for m in found])


def test_what_is_worth_nothing_is_in_no_set():
    worth = worth_of(
        outer_0={"low": 0.5, "pin": 0.0, "price": 1.0},
        outer_1={"low": 0.1, "pin": 0.1, "price": 1.0},  # a pin takes nothing away
        other={"low": 0.2, "pin": 0.0, "price": 1.0},
    )
    assert worth.sets([]) == [frozenset(), {"outer.0"}, {"outer.0", "other"}]


def test_what_must_be_pinned_is_in_every_set():
    worth = worth_of(
        outer_0={"must": True, "price": 1.0},
        other={"low": 0.2, "pin": 0.0, "price": 1.0},
    )
    musts = worth.musts()
    assert [c.name for c in musts] == ["outer.0"]
    assert worth.sets(musts) == [{"outer.0"}, {"outer.0", "other"}]


def test_a_parent_takes_the_place_of_its_parts_where_it_is_worth_more():
    parts = {"low": 0.2, "pin": 0.0, "price": 1.0}
    worth = worth_of(outer={"low": 0.5, "pin": 0.0, "price": 3.0}, outer_0=parts, outer_1=parts)
    assert worth.sets([])[-1] == {"outer"}
    worth = worth_of(outer={"low": 0.3, "pin": 0.0, "price": 3.0}, outer_0=parts, outer_1=parts)
    assert worth.sets([])[-1] == {"outer.0", "outer.1"}
    assert worth.overlaps(worth.candidates[0], frozenset({"outer.1"}))
    assert worth.overlaps(worth.candidates[1], frozenset({"outer"}))
    assert not worth.overlaps(worth.candidates[1], frozenset({"outer.1"}))
