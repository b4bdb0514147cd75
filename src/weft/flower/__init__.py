"""The engine for many machines, on Flower (`weft[flower]`): every import of `flwr` in weft is inside this folder.

    hub       SuperLink <-> server app (weft.flower.server_app): the loop, with `engine.Far` as its engine
    a site    SuperNode <-> client app (client.py): one process a message, all it remembers is on disk (memory.py)

Our encoded bytes travel as they are, inside one Flower record (envelope.py), and the ledger weighs those bytes.
"""
