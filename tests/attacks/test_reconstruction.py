"""The numbers of docs/trust.md about a hub that reconstructs images: it works, and the default limits slow it."""

from __future__ import annotations

import pytest
from reconstruct import ATTACKS, run

pytestmark = [pytest.mark.attack, pytest.mark.long]


@pytest.mark.parametrize("name", ATTACKS)
def test_how_many_images_a_lying_hub_gets(name):
    found = run(ATTACKS[name])
    works = name in {
        "before: FedAvg, SGD, one step",
        "before: FedAvg, Adam, one step, tiny gradients",
        "before: FedWeIT without m and A, Adam, one step, tiny gradients",
    }
    assert found >= 140 if works else found <= 20
