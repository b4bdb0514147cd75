"""What A is counted from, and what a mean of rows is counted from: two choices that the paper leaves open."""

import pytest
import torch
from helpers import run, vector

from weft import methods
from weft.core.storage import State
from weft.methods.fedweit.fedweit import anchored
from weft.wire.tensors import Rows

SEGMENTS = ((2, 1), (1, 2))  # two rows of one weight, one row of two


def test_only_what_is_cut_or_shrunk_knows_where_a_is_counted_from():
    """A = start + D is the same A, as long as nothing is shrunk, cut or given to others."""
    same = {
        "method.lambda_sparsity": 0.0,
        "method.adaptive_keep": 1.0,
        "method.kb_size": 0,
        "method.adaptive_rate": 1.0,
    }
    from_zero, from_start = (
        run(method="fedweit", **same, **{"method.adaptive_origin": origin}) for origin in ("zero", "start")
    )
    for one, other in zip(from_zero.clients.values(), from_start.clients.values(), strict=True):
        start = from_zero.world.lesson(0, 0).initial()[: from_zero.layout.weights] / 3
        torch.testing.assert_close(one.tensor("base"), other.tensor("base"), atol=1e-5, rtol=1e-4)
        whole = other.archive["adaptive/0"].dense() + start
        torch.testing.assert_close(one.archive["adaptive/0"].dense(), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["apd", "fedavg+apd"])
def test_a_task_answers_from_the_start_however_much_of_a_is_cut(name):
    """With everything cut from A theta is B * m + start, and not B * m alone."""
    words = {"method.adaptive_keep": 1e-9, "method.adaptive_origin": "start"}
    finished = run(method=name, **words)
    client, lesson = finished.clients[0], finished.world.lesson(0, 0)
    finished.method.answer_for(client, 0, lesson)
    layout, theta = lesson.layout, lesson.network.vector[: lesson.layout.weights]
    start = lesson.initial()[: layout.weights] / 3
    assert client.archive["adaptive/0"].nonzeros == 0
    for layer, rows in layout.by_layer(theta - start):
        base = client.tensor("base")[layer.span].view_as(rows)
        torch.testing.assert_close(rows, base * client.archive["mask/0"][layer.row_span, None])


def test_whoever_does_not_send_a_row_is_counted_as_theta_g():
    """Row 0: 10 + ((16 - 10) + (22 - 10)) / 3 = 16; row 2: (1, 2) + ((4, 2) - (1, 2)) / 3 = (2, 2)."""
    anchor = vector(10, 5, 1, 2)
    parts = [
        Rows(SEGMENTS, torch.tensor([True, False, False]), vector(16)),
        Rows(SEGMENTS, torch.tensor([True, False, False]), vector(22)),
        Rows(SEGMENTS, torch.tensor([False, False, True]), vector(4, 2)),
    ]
    found = anchored(anchor, parts, [1.0, 1.0, 1.0])
    assert found.kept.tolist() == [True, False, True]
    assert found.values.tolist() == pytest.approx([16, 2, 2])
    assert anchor.tolist() == pytest.approx([16, 5, 2, 2])
    weighted = anchored(vector(10, 5, 1, 2), parts, [1.0, 3.0, 1.0])
    assert weighted.values.tolist() == pytest.approx([10 + (6 + 3 * 12) / 5, 1 + 3 / 5, 2])


def test_anchored_equals_the_mean_where_all_send_all():
    plain, anchored_run = (
        run(method="fedweit", **{"method.keep": 1.0, "method.divide": divide}) for divide in ("senders", "anchored")
    )
    torch.testing.assert_close(
        plain.server.tensors["global"].dense(), anchored_run.server.tensors["global"].dense(), atol=1e-5, rtol=1e-4
    )
    names = {name for *_, name in anchored_run.parts("s2c")}
    assert not any("anchor" in name for name in names)  # it never travels


def test_saliency_keeps_what_the_loss_would_miss_most():
    """a^2 * E[g^2]: a small value with a steep gradient stays, a large one with a flat gradient goes."""
    method = methods.load("apd", {"adaptive_rank": "saliency", "adaptive_keep": 0.5})
    client = State(tensors={"adam/adaptive/second": vector(9, 1, 0, 4)})
    adaptive = vector(1, 2, 50, 2)  # 9, 4, 0, 16
    assert method._cut(client, adaptive).tolist() == [1, 0, 0, 2]
    del client.tensors["adam/adaptive/second"]
    assert method._cut(client, adaptive).tolist() == [0, 2, 50, 0]  # nothing is known of gradients: by size
