"""One file per model family: how its config.json becomes a ModelConfig."""
