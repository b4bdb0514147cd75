"""How a skip that somebody should hear of begins its reason; conftest.py says it aloud at the end."""

LOUD = "LOUD: "
