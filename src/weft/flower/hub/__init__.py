"""A federation of many machines: the hub's folder, a site's folder, their keys, and the processes that serve them."""
