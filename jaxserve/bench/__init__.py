"""Speed figures: `python -m jaxserve.bench WHAT`."""
