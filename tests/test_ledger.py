"""The ledger against figures worked by hand."""

import csv
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import WeftError
from weft.wire.ledger import HEADER, Entry, Ledger, by
from weft.wire.message import Message, MessageError, encode
from weft.wire.tensors import Rows, Sparse

BODY = 100


def wire(**tensors):
    return encode(Message("client-3", "server", "r", (), 1, 2, tensors))


ROWS = Rows.of(torch.arange(0.0, 20.0), ((10, 2),), torch.tensor([True] * 3 + [False] * 7))
SPARSE = Sparse.of(torch.tensor([0.0] * 50 + [1, 2] + [0.0] * 48))


def test_by_hand():
    ledger = Ledger(BODY)
    sent = wire(base=ROWS, adaptive=SPARSE)
    new = ledger.enter("c2s", 3, 1, 2, sent)
    header = len(sent) - int.from_bytes(sent[10:18], "little")  # the frame has the length of the payload
    # rows: 2 bytes of mask, 6 values of which one is zero; sparse: 2 gaps, 2 values
    assert new == [
        Entry("c2s", 3, 1, 2, "header", header, 0, header + 400),
        Entry("c2s", 3, 1, 2, "adaptive", 10, 2, 0),
        Entry("c2s", 3, 1, 2, "base", 26, 5, 0),
    ]
    assert ledger.entries == new
    empty = len(wire())
    assert ledger.enter("s2c", 3, 1, 2, wire()) == [Entry("s2c", 3, 1, 2, "header", empty, 0, empty)]
    assert ledger.totals() == {
        "c2s": {"bytes": header + 36, "nonzeros": 7, "dense_bytes": header + 400},
        "s2c": {"bytes": empty, "nonzeros": 0, "dense_bytes": empty},
    }
    assert all(type(value) is int for entry in new for value in (*entry[1:4], *entry[5:]))
    ledger = Ledger(BODY)
    assert set(ledger.totals()["c2s"].values()) == {0}
    assert by([]) == {}
    ledger.enter("s2c", 0, 0, 0, wire(base=torch.ones(BODY)))  # a dense float32 body is the baseline
    assert ledger.totals()["s2c"]["bytes"] == ledger.totals()["s2c"]["dense_bytes"]


MESSAGES = [wire(), wire(base=torch.ones(4)), wire(base=ROWS, adaptive=SPARSE), wire(**{'a,"b"': SPARSE})]
exchanges = st.lists(
    st.tuples(st.sampled_from(["c2s", "s2c"]), *[st.integers(0, 2)] * 3, st.sampled_from(MESSAGES)), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(exchanges)
def test_every_split_adds_up_to_the_whole(travelled):
    ledger = Ledger(BODY)
    for exchange in travelled:
        ledger.enter(*exchange)
    assert sum(total["bytes"] for total in ledger.totals().values()) == sum(len(sent) for *_, sent in travelled)
    whole = [sum(column) for column in zip(*ledger.by().values(), strict=True)]
    for columns in (["client"], ["task"], ["tensor"], ["round", "direction"], HEADER[:5]):
        assert [sum(column) for column in zip(*ledger.by(*columns).values(), strict=True)] == whole
    for direction in ("c2s", "s2c"):
        expected = sum(len(sent) for way, *_, sent in travelled if way == direction)
        assert ledger.totals()[direction]["bytes"] == expected


@settings(max_examples=60, deadline=None)
@given(exchanges)
def test_a_file_appended_line_by_line_reads_back(travelled):
    ledger, file = Ledger(BODY), io.StringIO(newline="")
    csv.writer(file).writerow(HEADER)
    for exchange in travelled:
        csv.writer(file).writerows(entry.to_row() for entry in ledger.enter(*exchange))
    file.seek(0)
    first, *rest = csv.reader(file)
    assert ",".join(first) == "direction,client,task,round,tensor,bytes,nonzeros,dense_bytes"
    again = Ledger(BODY)
    again.entries.extend(map(Entry.from_row, rest))
    assert again.entries == ledger.entries
    assert again.totals() == ledger.totals()


@pytest.mark.parametrize(
    "row",
    [
        [],
        ["c2s", "3"],
        ["up", "3", "0", "1", "base", "120", "30", "0"],
        ["c2s", "3", "0", "1", "base", "120", "30", "many"],
        ["c2s", "3", "0", "1", "base", "120", "30", "0", "0"],
        list(HEADER),
    ],
)
def test_damaged_rows_are_problems(row):
    with pytest.raises(WeftError, match=r"ledger row .* is damaged; expected direction,client"):
        Entry.from_row(row)


def test_wrong_words():
    ledger = Ledger(BODY)
    with pytest.raises(WeftError, match="no column 'clients'; did you mean client"):
        ledger.by("clients")
    with pytest.raises(MessageError):
        ledger.enter("c2s", 0, 0, 0, b"WEFT")
    assert ledger.entries == []
