"""How figures are drawn, from numbers by hand: no run is made."""

from __future__ import annotations

from weft import repro
from weft.metrics import Spread
from weft.repro import Row
from weft.repro.figures import attention, forgetting, style


def test_the_first_connected_layer_of_lenet():
    plan = repro.load("fig-attention").plan_of(Row("fedweit", "fedweit"), 0)
    assert attention.first_connected(plan) == 2  # after two convolutions


def test_the_tasks_of_the_paper_are_shown_where_they_are_there():
    curve = [(5.0, Spread(0.2, None))]
    panels = {"mnist-0": {"svhn-1": curve}, "mnist-1": {"svhn-1": curve, "svhn-0": curve}, "cifar100-3": {"a-0": curve}}
    assert attention.chosen(panels) == ["mnist-0", "cifar100-3"]
    del panels["mnist-0"]
    assert attention.chosen(panels) == ["mnist-1", "cifar100-3"]
    assert attention.by_dataset(panels)["mnist", "svhn"] == (1.0, 2)


def test_attention_is_drawn_from_the_largest_as_it_is_told():
    of = {name: [(2.0, Spread(value, None))] for name, value in {"a-0": 0.4, "mnist-1": 0.6, "svhn-0": 0.5}.items()}
    (axes, *_) = attention.draw({"mnist-0": of})[""].axes
    order = [label.get_text() for label in axes.get_yticklabels()]
    assert order == ["MNIST (1)", "SVHN (0)", "a (0)"]
    assert "MNIST (1) 0.6000, SVHN (0) 0.5000, a (0) 0.4000" in attention.tell({"mnist-0": of})[0]


def test_a_band_ends_where_shares_do():
    _, ((axes,),) = style.new(1, 1, 3, 3)
    style.plot(axes, "fedweit", [(0.0, Spread(0.95, 0.1)), (1.0, Spread(0.05, 0.1))], scale=100)
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0, 100)


def test_the_chosen_tasks_of_forgetting_lie_where_the_papers_do():
    from matplotlib.figure import Figure as Picture

    curves = {"fedweit": [(1.0, Spread(0.5, None))]}

    def titles(picture: Picture) -> list[str]:
        return [axes.get_title() for axes in picture.axes]

    for tasks, wanted in ((10, [3, 6, 8]), (7, [2, 4, 6]), (5, [2, 3, 4]), (2, [1])):
        panels = {f"task {place}": curves for place in range(1, tasks)}
        with style.drawing():
            assert titles(forgetting.draw(panels)[""]) == [f"task {place}" for place in wanted]
