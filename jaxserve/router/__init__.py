"""One HTTP front before several replicas: `python -m jaxserve.router`.

The modules, from the wire inwards:
- `__main__`, `launcher`, `children`, `devices`: the process; flags, signals, replicas that it starts itself.
- `app`, `fan_out`, `metrics`: routes.
- `proxy`, `upstream`, `event_tail`: one request on its way through.
- `request_reader`: what of a request matters for routing.
- `pool`, `health`: the replicas, and whether they are in rotation.

What decides is `jaxserve.routing`. Nothing here loads jax, and nothing logs a prompt.
"""
