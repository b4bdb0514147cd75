"""Two choices that the paper leaves open: what A is counted from, and what the mean of rows is counted from."""

import pytest
import torch
from helpers import run, vector
from methods_helpers import start_of_a, weit

from weft import methods
from weft.methods.fedweit.apd import APDClient
from weft.methods.fedweit.fedweit import FedWeITServer, anchored
from weft.methods.state import OptimizerState
from weft.wire.tensors import Rows

SEGMENTS = ((2, 1), (1, 2))  # two rows of one weight, one row of two


def test_the_origin_of_a_matters_only_where_a_is_shrunk_or_cut():
    """A = start + D is the same A, as long as nothing is shrunk, cut or given to others."""
    same = {"lambda_sparsity": 0.0, "adaptive_keep": 1.0, "kb_size": 0, "adaptive_rate": 1.0}
    from_zero, from_start = (weit(**same, adaptive_origin=origin) for origin in ("zero", "start"))
    for one, other in zip(from_zero.clients.values(), from_start.clients.values(), strict=True):
        torch.testing.assert_close(one.weights, other.weights, atol=1e-5, rtol=1e-4)
        whole = other.tasks[0].adaptive.dense() + start_of_a(from_zero)
        torch.testing.assert_close(one.tasks[0].adaptive.dense(), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["apd", "fedavg+apd"])
def test_a_task_is_evaluated_from_the_start_of_a_however_much_is_cut(name):
    """With everything cut from A theta is B * m + start, and not B * m alone."""
    finished = run(method=name, method__adaptive_keep=1e-9, method__adaptive_origin="start")
    client, layout = finished.clients[0], finished.layout
    assert client.tasks[0].adaptive.nonzeros == 0
    for layer, rows in layout.by_layer(finished.theta(0, 0)[: layout.weights] - start_of_a(finished)):
        base = client.weights[layer.span].view_as(rows)
        torch.testing.assert_close(rows, base * client.tasks[0].mask[layer.row_span, None])


def test_a_client_that_does_not_send_a_row_counts_as_theta_g():
    """Row 0: 10 + ((16 - 10) + (22 - 10)) / 3 = 16; row 2: (1, 2) + ((4, 2) - (1, 2)) / 3 = (2, 2)."""
    server = FedWeITServer(whole=vector(10, 5, 1, 2), changed=torch.zeros(3))
    parts = [
        Rows(SEGMENTS, torch.tensor([True, False, False]), vector(16)),
        Rows(SEGMENTS, torch.tensor([True, False, False]), vector(22)),
        Rows(SEGMENTS, torch.tensor([False, False, True]), vector(4, 2)),
    ]
    weighted = anchored(server.whole, parts, [1.0, 3.0, 1.0])
    assert weighted.values.tolist() == pytest.approx([10 + (6 + 3 * 12) / 5, 1 + 3 / 5, 2])
    found = anchored(server.whole, parts, [1.0, 1.0, 1.0])
    assert found.kept.tolist() == [True, False, True]
    assert found.values.tolist() == pytest.approx([16, 2, 2])
    server.replace_rows(found)
    assert server.whole.tolist() == pytest.approx([16, 5, 2, 2])


def test_anchored_equals_the_mean_where_all_send_all():
    plain, ours = (weit(keep=1.0, divide=divide) for divide in ("senders", "anchored"))
    torch.testing.assert_close(plain.server.weights.dense(), ours.server.weights.dense(), atol=1e-5, rtol=1e-4)
    assert ours.names("s2c") == {"weights", "foreign"}  # and no anchor


def test_saliency_keeps_what_the_loss_would_miss_most():
    """a^2 * E[g^2]: a small value with a steep gradient stays, a large one with a flat gradient goes."""
    method = methods.load("apd", {"adaptive_rank": "saliency", "adaptive_keep": 0.5})
    client = APDClient(optimizer=OptimizerState(second={"adaptive": vector(9, 1, 0, 4)}))
    adaptive = vector(1, 2, 50, 2)  # 9, 4, 0, 16
    assert method._cut(client, adaptive).tolist() == [1, 0, 0, 2]
    assert method._cut(APDClient(), adaptive).tolist() == [0, 2, 50, 0]  # gradients are unknown: by size
