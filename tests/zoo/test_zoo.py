"""Pins in other people's models: small random-weight configurations of many architectures."""

import pytest
from catalogue import MODELS
from sweep import FAILED, sweep

pytestmark = [
    pytest.mark.zoo,
    # The frameworks warn of much; dtypepin has nothing to warn of here.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::dtypepin.PinWarning"),
]


@pytest.mark.parametrize("name", MODELS)
def test_pins_hold_in_this_model_and_come_off_again(name, record):
    entry = MODELS[name]
    outcomes = list(sweep(entry.build))
    record(entry, outcomes)
    failed = [f"{o.kind} {o.mode}: {o.detail}" for o in outcomes if o.verdict == FAILED]
    assert not failed, "\n".join(failed)
