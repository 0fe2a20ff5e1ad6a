"""The commands `diff-trace` and `opdrift`; only here is anything printed, or an exit status chosen."""
