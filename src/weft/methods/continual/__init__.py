"""Methods without a server half."""
