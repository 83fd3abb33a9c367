"""`python -m jaxserve.top`: a live view of a server in the terminal."""
