"""Running from a pool that holds NaN wherever nobody has written: a read of it shows in the ids."""

from jaxserve.runtime import COMPILES
from tests.engine.conftest import ids


def poison(llm):
    """NaN in every page, the null page too; nothing is cached."""
    llm.engine.reset_prefix_cache()
    llm.engine.runner.fill_pool(float("nan"))


def generate(llm, prompts, settings):
    """Ids, from a pool full of NaN; nothing may be compiled."""
    poison(llm)
    compiles = COMPILES.count
    found = ids(llm.generate(prompts, settings, use_tqdm=False))
    assert COMPILES.count == compiles
    return found
