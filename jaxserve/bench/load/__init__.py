"""Open-loop load on a server: what to send and when, the client, and the figures of what came back."""
