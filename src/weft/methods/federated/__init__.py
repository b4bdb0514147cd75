"""Methods with a server half."""
