"""The process: wiring, routes, background loops, the listening socket, logs and metrics."""
