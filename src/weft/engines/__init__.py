"""How requests reach clients on this machine."""
