"""fairscale FullyShardedDataParallel: gathers, casts, moves and frees become marks; parameters keep their names."""

from opdrift_integrations.fairscale.integration import FairscaleIntegration

__all__ = ["FairscaleIntegration"]
