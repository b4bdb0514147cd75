"""weft: federated continual learning.

plan = weft.Plan(scenario="glyphs", clients=3, tasks=2, method="fedweit")
result = weft.run(plan)
print(result.accuracy, result.accuracy_matrix)
"""

from weft.errors import Problem
from weft.plan import Plan
from weft.result import Result
from weft.running import resume, run

__all__ = ["Plan", "Problem", "Result", "resume", "run"]
