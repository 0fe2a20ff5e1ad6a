"""What every exporter shares: which part of a trace is exported, what a comparison says of it, whole files."""
