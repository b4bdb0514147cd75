"""local: plain fine-tuning. Each client trains one network on its tasks in turn, and nothing protects what it knew.

The lower bound that shows how much is forgotten; all that it does is in methods/method.py.
"""

from __future__ import annotations

from weft.methods.method import Method, MethodInfo, Traits


class Local(Method):
    info = MethodInfo(
        citation="plain training, one task after another",
        verified="tests/test_baselines.py: test_local_is_plain_training",
    )
    traits = Traits(not_combinable="it is what every other method does when it adds nothing")
