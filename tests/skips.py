"""The prefix of skip reasons that conftest.py repeats at the end of a test run."""

LOUD = "LOUD: "
