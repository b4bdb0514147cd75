"""The server loop and the client; no method and no engine is known here."""
