"""The trace on disk: its schema, its writer and its reader."""
