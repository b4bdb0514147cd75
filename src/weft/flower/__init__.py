"""Federations of many machines on Flower (`weft[flower]`): every import of `flwr` in weft is inside this folder.

    hub     SuperLink <-> server app (server_app.py): the server loop with a FlowerEngine (engine.py)
    site    SuperNode <-> client app (client_app.py): one process per message, all state is on disk (site_state.py)

Encoded weft messages travel unchanged inside one Flower record (envelope.py); the ledger counts those bytes.
"""
