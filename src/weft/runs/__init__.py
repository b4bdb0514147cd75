"""From a plan to a result."""
