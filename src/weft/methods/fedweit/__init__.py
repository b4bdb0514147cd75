"""FedWeIT and its local half, APD."""
