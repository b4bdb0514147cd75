"""weft: federated continual learning.

plan = weft.Plan(scenario="glyphs", clients=3, tasks=2, method="fedweit")
result = weft.run(plan)
print(result.accuracy, result.accuracy_matrix)
"""

from weft.errors import WeftError
from weft.plan import Plan
from weft.runs.result import Result, load
from weft.runs.run import resume, run

__all__ = ["Plan", "Result", "WeftError", "load", "resume", "run"]
