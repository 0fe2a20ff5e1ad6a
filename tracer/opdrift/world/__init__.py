"""Several ranks of one run: their collectives put together, and what should be equal among them."""

from opdrift.world.collectives import Collective, Disagreement, Meeting, World

__all__ = ["Collective", "Disagreement", "Meeting", "World"]
