"""local: plain fine-tuning. Each client trains one network on its tasks in turn, and nothing guards what it knew.

The lower bound that shows how much is forgotten; all that it does stands in base.py.
"""

from __future__ import annotations

from typing import ClassVar

from weft.methods.method import Method


class Local(Method):
    citation: ClassVar[str] = "plain training, one task after another"
    verified: ClassVar[str] = "tests/test_baselines.py: test_local_is_plain_training"
    alone: ClassVar[str] = "it is what every other method does when it adds nothing"
